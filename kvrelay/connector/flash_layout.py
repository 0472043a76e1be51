"""The blocks of vLLM's GPU attention kernels against ``[token, kv_head, head_dim]`` tensors. Checked, never assumed.

FlashAttention, FlashInfer and Triton share one logical shape in vLLM 0.32, ``[block, kv_head, token, K|V]``, whatever
the order in memory (NHD, HND, layers or blocks outermost): the strides tell it. A block of the scheduler may be several
of the kernel's. The engine's own kernel writes; that reading finds what it wrote is tried once, before anything is
served.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrelay.errors import Misconfigured

FlashWriter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``write(key, value, key_cache, value_cache, slot_mapping)``: caches as ``[block, token, kv_head, head_dim]``."""


class FlashLayout:
    """Copies tokens between one engine's blocks and tensors on the same device."""

    def __init__(self, kv_layer: torch.Tensor, write: FlashWriter, block_tokens: int) -> None:
        """``kv_layer`` holds no request's KV yet; ``block_tokens`` is the scheduler's. Raises ``Misconfigured``."""
        _, self.heads, self._kernel_tokens, double = kv_layer.shape
        self.head_dim = double // 2
        self.block_tokens = block_tokens
        self._device = kv_layer.device
        self._write = write
        if block_tokens % self._kernel_tokens:
            raise Misconfigured(f"blocks of {block_tokens} tokens are not whole kernel blocks of {self._kernel_tokens}")
        self._order = "NHD" if kv_layer.stride(2) > kv_layer.stride(1) else "HND"
        self._probe(kv_layer)

    def __repr__(self) -> str:
        return f"<FlashLayout {self.block_tokens} tokens a block, {self._order} on {self._device}>"

    def _probe(self, kv_layer: torch.Tensor) -> None:
        """Write numbered tokens to one of the scheduler's blocks and read them; leave zeros behind."""
        tokens = torch.arange(self.block_tokens)
        shape = (self.block_tokens, self.heads, self.head_dim)
        # Numbers that bfloat16 holds exactly, different for neighbours in every direction.
        numbers = (torch.arange(tokens.numel() * self.heads * self.head_dim) % 251).view(shape).to(kv_layer)
        slots = (tokens + self.block_tokens).to(self._device)
        before = kv_layer[: 3 * self.block_tokens // self._kernel_tokens].clone()
        self.scatter(kv_layer, slots, numbers, -numbers)
        read = self.gather(kv_layer, *self.place(torch.ones_like(tokens), tokens))
        wrote = kv_layer[: len(before)] != before
        inside = torch.zeros_like(wrote)
        inside[self.block_tokens // self._kernel_tokens : 2 * self.block_tokens // self._kernel_tokens] = True
        kv_layer[: len(before)] = before
        same = torch.equal(read[0], numbers) and torch.equal(read[1], -numbers)
        if not same or bool((wrote & ~inside).any()):
            raise Misconfigured(
                "this engine's attention backend keeps its KV cache in an order that pages cannot be read back from; "
                "use VLLM_ATTENTION_BACKEND=FLASH_ATTN and an unquantised KV cache"
            )

    def place(self, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scheduler's block ids and offsets as the kernel's, where the blocks are. Does not wait for the device."""
        slots = blocks * self.block_tokens + offsets
        return self._send(slots // self._kernel_tokens), self._send(slots % self._kernel_tokens)

    def _send(self, index: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            return index.pin_memory().to(self._device, non_blocking=True)
        return index.to(self._device)

    def gather(
        self, kv_layer: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each ``[n, kv_head, head_dim]``, of the tokens that ``place`` placed."""
        key, value = kv_layer[blocks, :, offsets].split(self.head_dim, dim=-1)
        return key, value

    def scatter(self, kv_layer: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``[n, kv_head, head_dim]`` tensors to the token slots ``block * block_tokens + offset``."""
        key_cache, value_cache = kv_layer.transpose(1, 2).split(self.head_dim, dim=-1)
        self._write(key, value, key_cache, value_cache, slots)
