"""What a running store says of its ways to the other stores, for ``kvrelay doctor``."""

from __future__ import annotations

from pathlib import Path

from kvrelay import channel
from kvrelay.protocol.client import Describe, Described, LinkReport
from kvrelay.types import NIXL_MISSING

NO_PEER_YET = "no peer: one store alone has none; paths to others are tested some seconds after they register"


async def ways_of(socket: Path, key: bytes) -> list[LinkReport]:
    """Ask the store at ``socket``. Raises ``Lost``, ``Refused``, ``Malformed``."""
    link = await channel.connect(socket, key, sender="doctor", purpose="client")
    try:
        async with channel.in_time(socket):
            await link.send(Describe(id=1))
            return (await channel.expect(link, Described)).links
    finally:
        link.close()


def is_used(way: LinkReport) -> bool:
    """Whether pages may go this way."""
    return way.rank > 0


def is_spared(way: LinkReport, ways: list[LinkReport]) -> bool:
    """Whether ``way`` is missing for want of an optional package alone, and pages go another way to the same peer."""
    others = [other for other in ways if other.peer == way.peer and is_used(other)]
    return way.problem.startswith(NIXL_MISSING) and bool(others)


def in_words(way: LinkReport) -> str:
    """One line about one way."""
    if not is_used(way):
        return f"to {way.peer} by {way.transport}: not used, {way.problem}"
    speed = f"{_speed(way.bytes_per_s)}, round trip {way.latency_s * 1e3:.2f} ms"
    return f"to {way.peer} by {way.transport}: {speed}; {'taken' if way.rank == 1 else 'taken if those above fail'}"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"
