"""Makes tiny random Llama checkpoints with a real tokenizer: engines that start fast, for tests and benchmarks.

Their answers are nonsense but depend on every token of the prompt, so a wrong page changes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.deploy.convert import to_bfloat16, write_json, write_safetensors
from kvrelay.types import Value

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPU attention supports (``CPUAttentionBackend.get_supported_head_sizes``)."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = """The quick brown fox jumps over the lazy dog, and the dog looks up for a moment before it sleeps again.
A river begins as a thread of water between two stones and ends as wide as the sky that it carries.
When the train left the station at seven, nobody on the platform knew that it would not arrive until the next day.
Take two cups of flour, a cup of milk, three eggs and a little salt; stir until the batter is smooth.
In 1969 people walked on the moon for the first time; in 1989 a wall came down; in 2024 machines wrote letters.
What is the capital of France? The capital of France is Paris, which lies on the Seine.
Why do birds sing in the morning? They tell each other where they are and that they are still alive.
You are a helpful assistant. Answer the user's question with one or two short sentences.
def add(first, second): return first + second  # a function that adds two numbers
The first prefill reads the prompt, the decode writes the answer, and the cache is what they share.
Mathematics is the art of giving the same name to different things, and poetry is the opposite of that.
"""


class TinyShape(Value, frozen=True, kw_only=True):
    """The sizes of a tiny model."""

    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    hidden: int = 128
    intermediate: int = 256
    vocab: int = 512
    max_positions: int = 4096
    seed: int = 0


def make_tiny(folder: Path, shape: TinyShape | None = None) -> Path:
    """Write a model of ``shape`` into ``folder`` (created) and return it; the same seed gives the same weights."""
    shape = shape or TinyShape()
    if shape.head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {shape.head_dim} is not one of {HEAD_DIMS}")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, shape)
    write_json(folder / "config.json", _config(shape))
    write_json(folder / "generation_config.json", _special_ids())
    write_safetensors(folder / "model.safetensors", {k: to_bfloat16(v) for k, v in _weights(shape).items()})
    return folder


def _special_ids() -> dict[str, int]:
    return {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _config(shape: TinyShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_special_ids(),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
    }


def _weights(shape: TinyShape) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(shape.seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain / columns**0.5)

    ones = np.ones(shape.hidden, dtype=np.float32)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden, shape.hidden**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(shape.vocab, shape.hidden, 4.0),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones,
            prefix + "post_attention_layernorm.weight": ones,
            # Twice the usual gain: attention looks at few tokens instead of averaging all of them away.
            prefix + "self_attn.q_proj.weight": matrix(queries, shape.hidden, 2.0),
            prefix + "self_attn.k_proj.weight": matrix(keys, shape.hidden, 2.0),
            prefix + "self_attn.v_proj.weight": matrix(keys, shape.hidden),
            prefix + "self_attn.o_proj.weight": matrix(shape.hidden, queries, 2.0),
            prefix + "mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
    return weights


def _write_tokenizer(folder: Path, shape: TinyShape) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
    }
    write_json(folder / "tokenizer_config.json", config)
