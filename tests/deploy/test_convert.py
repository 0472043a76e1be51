"""Tests of deploy/convert.py, deploy/gguf_reader.py and deploy/tiny.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvrelay.deploy.convert import to_bfloat16, write_safetensors
from kvrelay.deploy.gguf_reader import hugging_face_name, unpermute
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.errors import Misconfigured


def test_bfloat16_is_rounded_to_nearest_with_ties_to_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF80FFFF, 0x00000000], dtype=np.uint32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF81, 0x0000]
    assert to_bfloat16(bits.view(np.float32)).tolist() == expected


def test_rounding_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).standard_normal(10_000, dtype=np.float32) * np.float32(1e-3)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (to_bfloat16(values) == theirs).all()


def test_safetensors_are_read_back_by_the_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(1, dtype=np.float32)}
    write_safetensors(tmp_path / "x.safetensors", {name: to_bfloat16(values) for name, values in tensors.items()})
    read = load_file(tmp_path / "x.safetensors")
    assert set(read) == {"a", "b"}
    assert read["b"].dtype == torch.bfloat16
    assert (read["b"].to(torch.float32).numpy() == tensors["b"]).all()


def test_unpermute_undoes_the_interleaving_of_rotary_pairs() -> None:
    rows, heads = 8, 2  # head dimension 4: halves are rows 0-1 and 2-3 of each head
    original = np.arange(rows, dtype=np.float32)[:, None] * np.ones((1, 3), dtype=np.float32)
    stored = original.reshape(heads, 2, rows // heads // 2, 3).swapaxes(1, 2).reshape(rows, 3)
    assert stored[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert (unpermute(np.ascontiguousarray(stored), heads) == original).all()


def test_tensor_names_become_those_of_hugging_face() -> None:
    assert hugging_face_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"


@pytest.mark.parametrize("name", ["blk.0.ssm_in.weight", "rope_freqs.weight", "blk.0"])
def test_a_tensor_of_another_kind_of_model_is_refused(name: str) -> None:
    with pytest.raises(Misconfigured, match="not one of a Llama model"):
        hugging_face_name(name)


def test_tiny_models_of_one_seed_are_equal_and_of_two_differ(tmp_path: Path) -> None:
    weights = [
        (make_tiny(tmp_path / name, TinyShape(seed=seed)) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_a_tiny_tokenizer_gives_back_any_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_tiny(tmp_path / "tiny") / "tokenizer.json"))
    text = "What is the capital of France?  \n\tÜmläut 漢字 🙂"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < 512
    assert len(tokenizer.encode("What is the capital of France?").ids) < 15


@pytest.mark.slow
def test_a_tiny_chat_template_marks_turns(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "tiny"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1
    assert 2 in ids


def test_a_head_size_that_the_engine_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head_dim 16"):
        make_tiny(tmp_path / "tiny", TinyShape(head_dim=16))
