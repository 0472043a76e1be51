"""How much of a public trace's prompts an engine with an LRU cache finds again, as the router's index foretells it.

    python -m benchmarks.reuse FOLDER

FOLDER holds traces in Mooncake's format: JSON lines with ``input_length`` and ``hash_ids``, one id for each 512 tokens
of the prompt, equal only after equal prefixes. The last half of the requests is counted; the first fills the cache.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvrelay.fleet.index import PageIndex
from kvrelay.fleet.page_log import PageLog
from kvrelay.types import Medium, PageName

BLOCK_TOKENS = 512
BLOCKS = (1_000, 5_859, 10_000, 19_531, 50_000)
UNLIMITED = 1 << 40


class TracedRequest(msgspec.Struct, frozen=True):
    """One line of a trace."""

    input_length: int
    hash_ids: list[int]

    @property
    def names(self) -> list[PageName]:
        return [PageName(number.to_bytes(16, "little")) for number in self.hash_ids]


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


def read_trace(path: Path) -> list[TracedRequest]:
    return [msgspec.json.decode(line, type=TracedRequest) for line in path.read_bytes().splitlines() if line]


def replay(trace: Sequence[TracedRequest], blocks: int) -> tuple[int, int]:
    """Tokens that were found again, and all tokens, of the last half of ``trace``."""
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


def main(folder: Path) -> None:
    for path in sorted(folder.glob("mooncake_*.jsonl")):
        trace = read_trace(path)
        for blocks in (*BLOCKS, UNLIMITED):
            begin = time.perf_counter()
            hits, total = replay(trace, blocks)
            size = "unlimited" if blocks == UNLIMITED else f"{blocks:,} blocks"
            seconds = time.perf_counter() - begin
            print(f"{path.stem}, {size}: {hits:,} of {total:,} tokens ({hits / total:.2%}), {seconds:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
