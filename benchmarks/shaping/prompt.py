"""A prompt whose KV is written into a store layer by layer, at the pace of a real prefill but without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt
import xxhash

from kvrelay.protocol.client import NewPage
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, PageName, SlotRef

FORMAT = PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=32)
"""SmolLM2 in bfloat16."""
PROMPT_TOKENS = 3000
CHUNK_TOKENS = 512
PREFILL_S = 6.9
"""What SmolLM2's prefill of ``PROMPT_TOKENS`` takes on one core of the kind of machine that this was measured on."""

_numbers = count()


class Prompt:
    """One prompt, with names that no other has and the same bytes as all others."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.pages = FORMAT.pages_for(PROMPT_TOKENS)
        self.names = [PageName(next(_numbers).to_bytes(16, "little")) for _ in range(self.pages)]
        self._data = data

    def tokens(self, page: int) -> int:
        return FORMAT.tokens_of(page, PROMPT_TOKENS)

    def segment(self, page: int, layer: int) -> npt.NDArray[np.uint8]:
        """Bytes of one layer of one page."""
        return self._data[page, layer, : self.tokens(page) * FORMAT.token_layer_bytes]

    def put(self, client: StoreClient) -> None:
        """All of it at once."""
        pages = range(self.pages)
        whole = [np.concatenate([self.segment(page, layer) for layer in range(FORMAT.layers)]) for page in pages]
        client.put_many([(self.names[page], whole[page].data, self.tokens(page)) for page in pages])

    def compute(self, client: StoreClient, transfer: str) -> float:
        """All of it, layer by layer and chunk by chunk; when the last layer was in (``time.perf_counter``)."""
        due = time.perf_counter()
        for first in range(0, self.pages, CHUNK_TOKENS // FORMAT.page_tokens):
            chunk = range(first, min(self.pages, first + CHUNK_TOKENS // FORMAT.page_tokens))
            refs = _take(client, len(chunk))
            parts = [NewPage(self.names[p], ref, self.tokens(p)) for p, ref in zip(chunk, refs, strict=True)]
            client.announce(parts, transfer)
            step_s = PREFILL_S * sum(map(self.tokens, chunk)) / PROMPT_TOKENS / FORMAT.layers
            for layer in range(FORMAT.layers):
                due += step_s
                time.sleep(max(0.0, due - time.perf_counter()))
                self._write(client, chunk, refs, layer)
        return time.perf_counter()

    def _write(self, client: StoreClient, chunk: range, refs: list[SlotRef], layer: int) -> None:
        arena = client.arena
        assert arena is not None
        for page, ref in zip(chunk, refs, strict=True):
            segment = self.segment(page, layer)
            arena.segment(ref.slot, layer, self.tokens(page))[:] = segment.data
            arena.publish(ref, layer, xxhash.xxh3_64_intdigest(segment.data))
        client.ring()


def _take(client: StoreClient, count: int) -> list[SlotRef]:
    refs = client.take_slots(count)
    while len(refs) < count:
        time.sleep(0.001)
        refs += client.take_slots(count - len(refs))
    return refs


def synthetic_kv() -> npt.NDArray[np.uint8]:
    """``[page, layer, byte]``: normal numbers in bfloat16, whose exponents pack about as well as those of real KV."""
    return np.stack(list(_pages()))


def _pages() -> Iterator[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    shape = (FORMAT.layers, FORMAT.kv_heads * 2 * FORMAT.page_tokens * FORMAT.head_dim)
    for _ in range(FORMAT.pages_for(PROMPT_TOKENS)):
        bits = rng.standard_normal(shape, np.float32).view(np.uint32) >> 16
        yield bits.astype(np.uint16).view(np.uint8)
