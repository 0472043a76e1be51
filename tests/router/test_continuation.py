"""Whom the wait for the rest of an answer blames."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvrelay.router.continuation import Continuation
from kvrelay.router.stream_silence import StreamSilence


class Clock:
    """A clock that a test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Rest:
    """A choice of as many events as it is told."""

    stopped = False

    def __init__(self, events: int) -> None:
        self._left = events

    @property
    def finished(self) -> bool:
        return self._left == 0

    def take(self, block: bytes) -> bytes:
        self._left -= 1
        return block


class Words:
    """A worker's reply that sends the words it has, and then no more."""

    def __init__(self, words: list[bytes], silence: StreamSilence) -> None:
        self._words = words
        self._silence = silence
        self.silent_since_s: list[float | None] = []
        """As it was when each word was asked for."""

    async def events(self) -> AsyncIterator[bytes]:
        for word in self._words:
            self.silent_since_s.append(self._silence.silent_since_s)
            yield word

    def close(self) -> None:
        pass


async def test_a_worker_that_writes_the_rest_has_as_long_as_a_slow_client_kept_it_from_sending() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    clock.now_s = 110.0  # so long nobody had been found to write the rest, for which no client is to blame
    leg: Any = (Rest(9), Words([b"one", b"two"], silence))
    rest = Continuation([leg], silence)
    blocks = rest.blocks()
    assert await anext(blocks) == b"one"
    assert leg[1].silent_since_s[0] == 110.0
    clock.now_s = 114.0  # so long the client took for it
    assert await anext(blocks) == b"two"
    silence.again()
    assert silence.silent_since_s == 118.0
    rest.close()
