"""Chooses how pages move by where the engine's blocks are, and writes to the blocks with the engine's own kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from vllm import _custom_ops as ops

from kvrelay.connector.flash_layout import FlashLayout
from kvrelay.connector.layout import BlockLayout
from kvrelay.connector.mover import HostMover, Mover
from kvrelay.connector.stream_mover import StreamMover
from kvrelay.connector.streams import CudaStreams
from kvrelay.errors import Misconfigured
from kvrelay.store.client import StoreClient

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEVICE_FILL_WAIT_S = 2.0
"""A page that a device's step planned is missing after so long; layers are copied within milliseconds."""


def fill_wait_s(vllm_config: VllmConfig) -> float:
    """How long after its step a page may be unfilled: on the host it is filled when the step ends."""
    return 0.0 if vllm_config.device_config.device_type == "cpu" else DEVICE_FILL_WAIT_S


def choose_mover(
    vllm_config: VllmConfig, layer_name: str, kv_layer: torch.Tensor, block_tokens: int, client: StoreClient
) -> Mover:
    """The mover for blocks like ``kv_layer``'s, which hold no request's KV yet. Raises ``Misconfigured``."""
    if kv_layer.device.type == "cpu":
        isa = vllm_config.compilation_config.static_forward_context[layer_name].isa
        return HostMover(BlockLayout(kv_layer, functools.partial(_write_host, isa=isa)), client.ring)
    if kv_layer.device.type == "cuda":
        scale = torch.ones(1, dtype=torch.float32, device=kv_layer.device)
        layout = FlashLayout(kv_layer, functools.partial(_write_flash, scale=scale), block_tokens)
        save, load = CudaStreams(kv_layer.device), CudaStreams(kv_layer.device)
        return StreamMover(layout, save, load, published=client.ring, report=client.report)
    raise Misconfigured(
        f"kvrelay: KV caches on {kv_layer.device.type} are not supported; use CPU or CUDA, or serve unsplit"
    )


def _write_host(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    isa: str,
) -> None:
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)


def _write_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: torch.Tensor,
) -> None:
    # "auto": the cache has the model's dtype; a page holds no quantised one, so the scales are never read.
    ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", scale, scale)
