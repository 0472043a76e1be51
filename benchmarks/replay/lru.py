"""What one engine with an LRU cache finds again of a trace, as the router's index foretells it. It must never know what
the index does not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from benchmarks.replay.trace import BLOCK_TOKENS, TracedRequest
from kvrelay.fleet.index import PageIndex
from kvrelay.fleet.page_log import PageLog
from kvrelay.types import Medium, PageName

UNLIMITED = 1 << 40


class LruEngine:
    """An engine's cache: what was used longest ago goes first, and of one prompt its end before its beginning."""

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._names: OrderedDict[PageName, None] = OrderedDict()
        self.log = PageLog("1")

    def __repr__(self) -> str:
        return f"<LruEngine {len(self._names)}/{self._limit} blocks>"

    def compute(self, names: Sequence[PageName]) -> None:
        """Serve a prompt."""
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        excess = max(0, len(self._names) - self._limit)
        gone = [self._names.popitem(last=False)[0] for _ in range(excess)]
        self.log.remove(gone, Medium.HBM)
        self.log.store((name for name in names if name in self._names), Medium.HBM)


def foretell(trace: Sequence[TracedRequest], blocks: int) -> tuple[int, int]:
    """Tokens that are found again, and all tokens, of the last half of ``trace``; the first fills the cache."""
    engine, index = LruEngine(blocks), PageIndex()
    told = engine.log.follow(index.open("engine", "1", 0.0).after)
    hits = total = 0
    for number, request in enumerate(trace):
        names = request.names
        if number >= len(trace) // 2:
            hits += min(request.input_length, BLOCK_TOKENS * index.find(names).at("engine"))
            total += request.input_length
        engine.compute(names)
        while (message := next(told)) is not None:
            index.take("engine", "1", message, 0.0)
        index.tick(float(number))
    index.check_invariants()
    return hits, total
