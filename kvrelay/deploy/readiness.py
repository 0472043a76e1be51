"""Asks a router whom it gives work, as its members' parent wants to know. It must never take the word of one router for
that of another."""

from __future__ import annotations

from kvrelay import channel
from kvrelay.errors import KvrelayError
from kvrelay.protocol.operator import AskReady, Ready


async def lacking(control: str, key: bytes, expected: set[str], *, or_draining: set[str]) -> str:
    """Why the router with this ``control`` port is not as it should be, or whom it lacks; empty when all is well.

    ``expected`` get work there; ``or_draining`` do, or are known to drain.
    """
    try:
        said = await _ask(control, key)
    except KvrelayError as error:
        return str(error)
    missing = sorted((expected - set(said.members)) | (or_draining - set(said.members) - set(said.draining)))
    if missing:
        return f"it lacks {', '.join(missing)}"
    return "" if said.serving else said.why


async def answers(control: str, key: bytes) -> bool:
    """Whether the router with this ``control`` port says anything, within the time of two handshakes."""
    try:
        await _ask(control, key)
    except KvrelayError:
        return False
    return True


async def _ask(control: str, key: bytes) -> Ready:
    link = await channel.connect(control, key, sender="kvrelay up", purpose="operator")
    try:
        async with channel.in_time(control):
            await link.send(AskReady())
            return await channel.expect(link, Ready)
    finally:
        link.close()
