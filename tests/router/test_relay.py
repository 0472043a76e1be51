"""A relay lets words past only while it waits for them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvrelay.errors import Lost
from kvrelay.router.relay import Relay
from kvrelay.router.stream_silence import StreamSilence

WORD = b'data: {"choices":[{"text":"x"}]}\n\n'


class Outlet:
    """A client that reads all."""

    is_ready = True

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def write(self, block: bytes) -> None:
        self.got.append(block)


async def as_it_is(block: bytes) -> bytes:
    return block


async def words() -> AsyncIterator[bytes]:
    yield WORD
    raise Lost("the worker broke off its answer")


async def test_nothing_passes_once_the_worker_broke_off() -> None:
    relay, outlet = Relay(None, StreamSilence(lambda: 0.0), as_it_is, None, None), Outlet()
    relay.shorten(outlet)
    blocks = [block async for block in relay.blocks(WORD, words())]
    assert blocks[:2] == [WORD, WORD]
    assert b'"code":502' in blocks[2]
    assert not relay.pass_on(WORD)
    assert outlet.got == []
