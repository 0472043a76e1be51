from __future__ import annotations

import pytest
import torch

from kvrelay.connector.layout import BlockLayout, CacheWriter, token_slots
from kvrelay.errors import Misconfigured
from tests.connector import caches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("write", [caches.write_dim_major, caches.write_packed])
def test_gather_gives_back_what_the_kernel_wrote_bit_for_bit(write: CacheWriter, dtype: torch.dtype) -> None:
    cache = caches.empty_cache(dtype=dtype)
    layout = BlockLayout(cache, write)
    key, value = (torch.randn(100, caches.HEADS, caches.HEAD_DIM).to(dtype) for _ in range(2))
    blocks, offsets = token_slots([7, 3, 9], 17, 100, caches.BLOCK_TOKENS)

    layout.scatter(cache, blocks * caches.BLOCK_TOKENS + offsets, key, value)
    got_key, got_value = layout.gather(cache, blocks, offsets)

    assert torch.equal(got_key, key)
    assert torch.equal(got_value, value)


def test_the_order_inside_a_block_is_found_by_probing() -> None:
    assert "K dim-major, V token-major" in repr(BlockLayout(caches.empty_cache(), caches.write_dim_major))
    assert "K packed, V packed" in repr(BlockLayout(caches.empty_cache(), caches.write_packed))


def test_a_kernel_that_does_not_keep_every_element_is_refused() -> None:
    with pytest.raises(Misconfigured, match="not a reordering"):
        BlockLayout(caches.empty_cache(), caches.write_broadcast)


def test_positions_map_to_the_blocks_of_the_table() -> None:
    blocks, offsets = token_slots([5, 2], 62, 4, 64)
    assert blocks.tolist() == [5, 5, 2, 2]
    assert offsets.tolist() == [62, 63, 0, 1]
