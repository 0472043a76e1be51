"""KV caches with the block layouts that engines use, written by plain torch instead of an engine's kernel."""

from __future__ import annotations

import torch

BLOCK_TOKENS = 64
HEADS = 2
HEAD_DIM = 8


def write_dim_major(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """K as ``[head_dim][token]``, V as ``[token][head_dim]``: the order of vLLM's vector kernels."""
    blocks, heads, tokens, dim = key_cache.shape
    strides = (key_cache.stride(0), key_cache.stride(1), tokens, 1)
    transposed = key_cache.as_strided((blocks, heads, dim, tokens), strides, key_cache.storage_offset())
    transposed[slots // tokens, :, :, slots % tokens] = key
    value_cache[slots // tokens, :, slots % tokens] = value


def write_packed(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Pairs of dimensions interleaved over tokens, in K and V: the kind of order that matrix units want."""
    for source, cache in ((key, key_cache), (value, value_cache)):
        blocks, heads, tokens, dim = cache.shape
        strides = (cache.stride(0), cache.stride(1), 2 * tokens, 2, 1)
        paired = cache.as_strided((blocks, heads, dim // 2, tokens, 2), strides, cache.storage_offset())
        paired[slots // tokens, :, :, slots % tokens] = source.reshape(len(source), heads, dim // 2, 2)


def write_broadcast(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Not a reordering: every dimension gets the first one's value."""
    write_dim_major(key[..., :1].expand_as(key), value, key_cache, value_cache, slots)


def write_flash(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Caches as ``[block][token][kv_head][head_dim]`` views: what vLLM's GPU kernels are given."""
    tokens = key_cache.shape[1]
    key_cache[slots // tokens, slots % tokens] = key
    value_cache[slots // tokens, slots % tokens] = value


def flash_cache(order: str = "NHD", blocks: int = 12, device: str = "cpu") -> torch.Tensor:
    """One layer's cache as vLLM allocates it for its GPU kernels: logically ``[block, kv_head, token, K|V]``."""
    if order == "HND":
        return torch.zeros(blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM, device=device)
    return torch.zeros(blocks, BLOCK_TOKENS, HEADS, 2 * HEAD_DIM, device=device).transpose(1, 2)


def empty_cache(
    blocks: int = 12, dtype: torch.dtype = torch.float32, *, heads: int = HEADS, block_tokens: int = BLOCK_TOKENS
) -> torch.Tensor:
    """One layer's cache, full of numbers that are no request's."""
    return torch.randn(blocks, heads, block_tokens, 2 * HEAD_DIM).to(dtype)
