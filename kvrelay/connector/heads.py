"""Which KV heads a tensor-parallel rank holds, and which share of a page it writes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import Shard


@dataclass(frozen=True)
class RankHeads:
    """One rank's heads among those of the whole model, as vLLM's ``QKVParallelLinear`` deals them out."""

    first: int
    count: int
    shard: Shard | None
    """What the rank writes of each page; None when another rank holds the same head and writes it."""

    @classmethod
    def of(cls, rank: int, ranks: int, kv_heads: int) -> RankHeads:
        """Heads of ``rank`` of ``ranks``. With more ranks than heads, neighbours share one and the first writes it."""
        if ranks <= kv_heads:
            share = kv_heads // ranks
            return cls(rank * share, share, Shard(rank, ranks))
        copies = ranks // kv_heads
        head = rank // copies
        return cls(head, 1, None if rank % copies else Shard(head, kv_heads))

    def runs(self, shards: int, kv_heads: int) -> range:
        """Numbers of the writers' runs that together hold these heads, of a page with ``shards`` writers."""
        width = kv_heads // shards
        return range(self.first // width, -(-(self.first + self.count) // width))
