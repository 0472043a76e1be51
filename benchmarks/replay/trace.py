"""A public trace in Mooncake's format: when each request came, how long it was, and which blocks it shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvrelay.types import PageName

BLOCK_TOKENS = 512


class TracedRequest(msgspec.Struct, frozen=True):
    """One line of a trace."""

    input_length: int
    hash_ids: list[int]
    """One for each 512 tokens of the prompt, the last of which may be fewer; equal only after equal prefixes."""
    timestamp: float = 0.0
    """Milliseconds after the first request."""
    output_length: int = 1

    @property
    def names(self) -> list[PageName]:
        """Of all pages, the partial last one included."""
        return [PageName(number.to_bytes(16, "little")) for number in self.hash_ids]

    @property
    def full_names(self) -> list[PageName]:
        """Of those that an engine keeps: full blocks."""
        return self.names[: self.input_length // BLOCK_TOKENS]


def read_trace(path: Path) -> list[TracedRequest]:
    return [msgspec.json.decode(line, type=TracedRequest) for line in path.read_bytes().splitlines() if line]


def traced_s(trace: Sequence[TracedRequest]) -> list[float]:
    """When each request comes, in seconds, as the trace has it."""
    return [request.timestamp / 1e3 for request in trace]


def spread_s(trace: Sequence[TracedRequest]) -> list[float]:
    """The same, where the requests of one tick come evenly over the time until the next: traces tick every few seconds,
    clients do not."""
    ticks = [list(group) for _, group in itertools.groupby(traced_s(trace))]
    return list(_spread(ticks))


def _spread(ticks: Sequence[Sequence[float]]) -> Iterator[float]:
    for tick, following in itertools.zip_longest(ticks, ticks[1:]):
        until_s = following[0] if following else tick[0]
        yield from (tick[0] + (until_s - tick[0]) * at / len(tick) for at in range(len(tick)))
