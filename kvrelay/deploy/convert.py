"""Turns a GGUF file into a Hugging Face folder, byte for byte the same on every machine.

It writes the files by hand rather than through torch and transformers: their output changes with their version,
and then no checksum could be recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.deploy.gguf_reader import GgufFile

_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def convert(source: Path, folder: Path, report: Callable[[float], None]) -> None:
    """Write ``source`` as a Hugging Face model into ``folder`` (weights in bfloat16); ``report`` gets the fraction."""
    gguf = GgufFile(source)
    write_json(folder / "config.json", _config(gguf))
    write_json(folder / "generation_config.json", _special_ids(gguf))
    write_json(folder / "tokenizer.json", _tokenizer(gguf))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(gguf))
    tensors: dict[str, NDArray[np.uint16]] = {}
    for name, values in gguf.tensors():
        tensors[name] = to_bfloat16(values)
        report(len(tensors) / gguf.tensor_count())
    write_safetensors(folder / "model.safetensors", tensors)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of ``values`` rounded to bfloat16 (nearest, ties to even); numpy has no such type."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.uint16]]) -> None:
    """Write bfloat16 ``tensors`` as one safetensors file: 8-byte header length, JSON header, then the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        end = offset + tensors[name].nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(tensors[name].astype("<u2", copy=False).tobytes())


def _config(gguf: GgufFile) -> dict[str, Any]:
    heads = int(gguf.field("llama.attention.head_count"))
    hidden = int(gguf.field("llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_special_ids(gguf),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(gguf.field("llama.feed_forward_length")),
        "max_position_embeddings": int(gguf.field("llama.context_length")),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(gguf.field("llama.block_count")),
        "num_key_value_heads": int(gguf.field("llama.attention.head_count_kv")),
        # GGUF stores it in float32; seven digits give back the value that was meant.
        "rms_norm_eps": float(f"{gguf.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(gguf.field("llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(gguf.field("llama.vocab_size")),
    }


def _special_ids(gguf: GgufFile) -> dict[str, Any]:
    return {
        "bos_token_id": int(gguf.field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(gguf.field("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(gguf.field("tokenizer.ggml.padding_token_id")),
    }


def _added_token(token: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": content, **flags}


def _control_tokens(gguf: GgufFile) -> list[dict[str, Any]]:
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    kinds: list[int] = gguf.field("tokenizer.ggml.token_type")
    return [
        _added_token(token, content)
        for token, (content, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL_TOKEN
    ]


def _tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """Byte-level BPE that splits digits first: what the GGUF calls pre-tokenizer ``smollm``."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _control_tokens(gguf),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {content: token for token, content in enumerate(tokens)},
            "merges": gguf.field("tokenizer.ggml.merges"),
        },
    }


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    ids = _special_ids(gguf)
    special = _control_tokens(gguf)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in special
        },
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[int(gguf.field("tokenizer.ggml.unknown_token_id"))],
        "chat_template": gguf.field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(gguf.field("llama.context_length")),
    }
