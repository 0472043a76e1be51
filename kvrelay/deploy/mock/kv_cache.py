"""The simulated KV cache of one engine: blocks of one page each, found by name, the least recently used evicted first.

It must never hold more blocks than it has, nor evict one that a request uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvrelay.types import PageName

Told = Callable[[Sequence[PageName]], None]


class KvCache:
    """Counts blocks in use without a name, and keeps those with one: in use, or idle until their room is needed."""

    def __init__(self, blocks: int, *, stored: Told, removed: Told) -> None:
        """``stored`` and ``removed`` hear which names came and went."""
        self.blocks = blocks
        self._stored = stored
        self._removed = removed
        self._used: dict[PageName, int] = {}
        """How many requests use each page."""
        self._idle: dict[PageName, None] = {}
        """Oldest first."""
        self._unnamed = 0

    def __repr__(self) -> str:
        return f"<KvCache {self.used_blocks} of {self.blocks} blocks in use, {len(self._idle)} idle>"

    @property
    def used_blocks(self) -> int:
        return len(self._used) + self._unnamed

    @property
    def usage(self) -> float:
        """Share of the blocks that requests use."""
        return self.used_blocks / self.blocks

    def match(self, names: Sequence[PageName]) -> int:
        """How many leading pages of ``names`` are here."""
        used, idle = self._used, self._idle
        for count, name in enumerate(names):
            if name not in used and name not in idle:
                return count
        return len(names)

    def hold(self, names: Iterable[PageName]) -> None:
        """A request uses these pages, which are here."""
        used, idle = self._used, self._idle
        for name in names:
            if name in used:
                used[name] += 1
            else:
                del idle[name]
                used[name] = 1

    def take(self, count: int) -> bool:
        """Give a request ``count`` blocks without a name; False, and nothing happened, when so many are not free."""
        if self.used_blocks + count > self.blocks:
            return False
        self._unnamed += count
        self._evict()
        return True

    def _evict(self) -> None:
        excess = self.used_blocks + len(self._idle) - self.blocks
        if excess > 0:
            gone = [name for name, _ in zip(self._idle, range(excess), strict=False)]
            for name in gone:
                del self._idle[name]
            self._removed(gone)

    def fill(self, names: Sequence[PageName]) -> None:
        """As many unnamed blocks of a request now hold these pages. Copies of a page share one block."""
        used, idle = self._used, self._idle
        fresh = [name for name in names if name not in used and name not in idle]
        self._unnamed -= len(names)
        if len(fresh) < len(names):
            self.hold(name for name in names if name in used or name in idle)
        if fresh:
            used.update(dict.fromkeys(fresh, 1))
            self._stored(fresh)

    def release(self, names: Sequence[PageName], unnamed: int) -> None:
        """A request gives back what it holds. The end of a prompt goes before its beginning: vLLM evicts so, too."""
        self._unnamed -= unnamed
        used, idle = self._used, self._idle
        for name in reversed(names):
            if used[name] > 1:
                used[name] -= 1
            else:
                del used[name]
                idle[name] = None

    def check_invariants(self) -> None:
        """Raise AssertionError unless the counts fit together."""
        assert self._unnamed >= 0, "more blocks were given back than taken"
        assert self.used_blocks + len(self._idle) <= self.blocks, "more blocks than there are"
        assert not self._used.keys() & self._idle.keys(), "a block is in use and idle"
