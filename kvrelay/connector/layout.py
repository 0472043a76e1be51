"""Canonical pages against the engine's blocks. The inside of a block is discovered, never assumed.

vLLM's CPU kernels pack K in an order that depends on the instruction set. Loading goes through
vLLM's own cache-write kernel, which knows it; saving needs the inverse, so the kernel is probed
once with numbered elements and the order is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.errors import Misconfigured

CacheWriter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``write(key, value, key_cache, value_cache, slot_mapping)``: key and value are ``[token, kv_head, head_dim]``."""

_EXACT_INTEGERS = 256
"""bfloat16 holds the integers 0..256 exactly, so offsets are probed one base-256 digit at a time."""


class KVLayout(Protocol):
    """Where the K and V of a token lie in one engine's blocks."""

    heads: int
    head_dim: int
    block_tokens: int

    def place(self, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block ids and offsets in a block as ``gather`` takes them, where the blocks are."""
        ...

    def gather(
        self, kv_layer: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each ``[n, kv_head, head_dim]``."""
        ...

    def scatter(self, kv_layer: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``[n, kv_head, head_dim]`` tensors to the token slots ``block * block_tokens + offset``."""
        ...


def split_cache(kv_layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer's cache, each ``[block, kv_head, block_tokens, head_dim]`` as the kernel takes them.

    ``kv_layer`` is ``[block, kv_head, block_tokens, 2 * head_dim]``.
    """
    blocks, heads, tokens, _ = kv_layer.shape
    key, value = kv_layer.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    return key, value


class BlockLayout:
    """Copies tokens between one engine's blocks and ``[token, kv_head, head_dim]`` tensors."""

    def __init__(self, kv_layer: torch.Tensor, write: CacheWriter) -> None:
        """Probe ``write`` for the element order of ``kv_layer``'s blocks. Raises ``Misconfigured``."""
        _, self.heads, self.block_tokens, double = kv_layer.shape
        self.head_dim = double // 2
        self._write = write
        self._offsets = self._probe(kv_layer.dtype)
        plain = torch.arange(self.block_tokens * self.head_dim)
        self._orders = [_order_of(offsets, plain, self.head_dim) for offsets in self._offsets]

    def __repr__(self) -> str:
        return f"<BlockLayout {self.block_tokens} tokens a block, K {self._orders[0]}, V {self._orders[1]}>"

    def _probe(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """For K and V: element offset inside a (block, head) region of each ``[token, head_dim]``."""
        shape = (self.block_tokens, 1, self.head_dim)
        numbers = torch.arange(self.block_tokens * self.head_dim).view(shape)
        read = [torch.zeros(numbers.numel(), dtype=torch.int64) for _ in range(2)]
        unit = 1
        while unit < numbers.numel():
            digits = (numbers // unit % _EXACT_INTEGERS).to(dtype)
            # Two blocks: the write goes to the second, so an offset into the wrong block shows.
            cache = torch.zeros(2, 1, self.block_tokens, 2 * self.head_dim, dtype=dtype)
            slots = torch.arange(self.block_tokens, 2 * self.block_tokens)
            self._write(digits, digits.clone(), *split_cache(cache), slots)
            for part, raw in zip(read, cache[1].view(2, -1), strict=True):
                part += raw.to(torch.int64) * unit
            unit *= _EXACT_INTEGERS
        return [self._invert(part) for part in read]

    def _invert(self, stored: torch.Tensor) -> torch.Tensor:
        """``stored[offset]`` is the element found there; give ``offset`` by ``[token, head_dim]``."""
        count = self.block_tokens * self.head_dim
        if not torch.equal(stored.sort().values, torch.arange(count)):
            raise Misconfigured(
                "this CPU's KV cache layout is not a reordering of tokens and dimensions, so pages cannot be read "
                "back from it; run the engine with another dtype or block size"
            )
        offsets = torch.empty(count, dtype=torch.int64)
        offsets[stored] = torch.arange(count)
        return offsets.view(self.block_tokens, self.head_dim)

    def place(self, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """They are right as they are."""
        return blocks, offsets

    def gather(
        self, kv_layer: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each ``[n, kv_head, head_dim]``, of the tokens at ``(blocks[i], offsets[i])``."""
        parts = split_cache(kv_layer)
        key, value = (self._gather_part(parts[i], i, blocks, offsets) for i in range(2))
        return key, value

    def _gather_part(self, part: torch.Tensor, which: int, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if self._orders[which] == "token-major":
            return part[blocks, :, offsets]
        if self._orders[which] == "dim-major":
            strides = (part.stride(0), part.stride(1), self.block_tokens, 1)
            shape = (part.shape[0], self.heads, self.head_dim, self.block_tokens)
            return part.as_strided(shape, strides, part.storage_offset())[blocks, :, :, offsets]
        shape3 = (part.shape[0], self.heads, self.block_tokens * self.head_dim)
        flat = part.as_strided(shape3, (part.stride(0), part.stride(1), 1), part.storage_offset())
        heads = torch.arange(self.heads)
        return flat[blocks[:, None, None], heads[None, :, None], self._offsets[which][offsets][:, None, :]]

    def scatter(self, kv_layer: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``[n, kv_head, head_dim]`` tensors to the token slots ``block * block_tokens + offset``."""
        self._write(key, value, *split_cache(kv_layer), slots)


def _order_of(offsets: torch.Tensor, plain: torch.Tensor, head_dim: int) -> str:
    tokens = offsets.shape[0]
    if torch.equal(offsets.reshape(-1), plain):
        return "token-major"
    if torch.equal(offsets.t().reshape(-1), plain[: tokens * head_dim]):
        return "dim-major"
    return "packed"


def token_slots(blocks: list[int], start: int, tokens: int, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block id and offset of the positions ``start .. start + tokens`` in the block table ``blocks``."""
    positions = torch.arange(start, start + tokens)
    table = torch.tensor(blocks, dtype=torch.int64)
    return table[positions // block_tokens], positions % block_tokens
