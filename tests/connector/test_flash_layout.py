from __future__ import annotations

import pytest
import torch

from kvrelay.connector.flash_layout import FlashLayout, FlashWriter
from kvrelay.connector.layout import token_slots
from kvrelay.errors import Misconfigured
from tests.connector import caches


def interleaved_layers(layers: int = 3, order: str = "NHD") -> torch.Tensor:
    """One layer of a cache in which each block holds all layers: vLLM's block-outermost layouts."""
    shape = (12, layers, caches.BLOCK_TOKENS, caches.HEADS, 2 * caches.HEAD_DIM)
    if order == "HND":
        return torch.zeros(12, layers, caches.HEADS, caches.BLOCK_TOKENS, 2 * caches.HEAD_DIM)[:, 1]
    return torch.zeros(shape)[:, 1].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "cache",
    [caches.flash_cache("NHD"), caches.flash_cache("HND"), interleaved_layers(), interleaved_layers(order="HND")],
    ids=["NHD", "HND", "blocks outermost, NHD", "blocks outermost, HND"],
)
def test_gather_gives_back_what_the_kernel_wrote_bit_for_bit(cache: torch.Tensor, dtype: torch.dtype) -> None:
    cache = torch.empty_strided(cache.shape, cache.stride(), dtype=dtype).zero_()
    layout = FlashLayout(cache, caches.write_flash, caches.BLOCK_TOKENS)
    key, value = (torch.randn(100, caches.HEADS, caches.HEAD_DIM).to(dtype) for _ in range(2))
    blocks, offsets = token_slots([7, 3, 9], 17, 100, caches.BLOCK_TOKENS)
    layout.scatter(cache, blocks * caches.BLOCK_TOKENS + offsets, key, value)
    got = layout.gather(cache, *layout.place(blocks, offsets))
    assert torch.equal(got[0], key)
    assert torch.equal(got[1], value)


def test_a_block_of_the_scheduler_may_be_several_of_the_kernels() -> None:
    cache = torch.zeros(24, 16, caches.HEADS, 2 * caches.HEAD_DIM).transpose(1, 2)
    layout = FlashLayout(cache, caches.write_flash, 32)
    key, value = (torch.randn(64, caches.HEADS, caches.HEAD_DIM) for _ in range(2))
    blocks, offsets = token_slots([5, 2], 0, 64, 32)
    layout.scatter(cache, blocks * 32 + offsets, key, value)
    assert torch.equal(cache[10, :, 3, : caches.HEAD_DIM], key[3]), "block 5 is the kernel's 10 and 11"
    assert torch.equal(layout.gather(cache, *layout.place(blocks, offsets))[1], value)


def test_probing_leaves_the_cache_as_it_was() -> None:
    cache = torch.randn(12, caches.HEADS, caches.BLOCK_TOKENS, 2 * caches.HEAD_DIM)
    before = cache.clone()
    FlashLayout(cache, caches.write_flash, caches.BLOCK_TOKENS)
    assert torch.equal(cache, before)


def write_scaled(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """As a quantising kernel does."""
    caches.write_flash(key / 2, value / 2, key_cache, value_cache, slots)


def write_elsewhere(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Right, and a stray write into another block."""
    caches.write_flash(key, value, key_cache, value_cache, slots)
    key_cache[0, 0] = 7.0


@pytest.mark.parametrize("write", [write_scaled, write_elsewhere])
def test_a_kernel_that_writes_anything_else_is_refused(write: FlashWriter) -> None:
    with pytest.raises(Misconfigured, match="attention backend"):
        FlashLayout(caches.flash_cache(), write, caches.BLOCK_TOKENS)


def test_blocks_that_are_no_whole_kernel_blocks_are_refused() -> None:
    with pytest.raises(Misconfigured, match="whole kernel blocks"):
        FlashLayout(caches.flash_cache(), caches.write_flash, caches.BLOCK_TOKENS + 16)
