"""Model folders that no engine could read, and some that one can."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.cli.doctor import Verdict, findings
from kvrelay.config import Config, MockConfig, ModelConfig
from kvrelay.deploy import model_files
from kvrelay.deploy.cache import models_root
from kvrelay.deploy.model import DEFAULT_MODEL, model_path
from kvrelay.deploy.model_files import may_be_served
from kvrelay.deploy.tiny import make_tiny
from kvrelay.errors import Misconfigured


def cut_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":')


def other_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"x": 1}')


def unknown_architecture(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"architectures": ["FooForCausalLM"]}))


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def cut_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def pointer(folder: Path) -> None:
    """What a clone without its large files has in place of them."""
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN = [
    (cut_config, "config.json is damaged: Input data was truncated"),
    (other_config, "config.json is of no model: it names neither architectures nor a model_type"),
    (unknown_architecture, "config.json: this vLLM serves no FooForCausalLM (architectures)"),
    (cut_weights, "model.safetensors is damaged: it has 100000 bytes, and should have "),
    (cut_header, "model.safetensors is damaged: 100 bytes, and no header of safetensors in them"),
    (pointer, "model.safetensors is damaged: 43 bytes, and no header of safetensors in them"),
    (missing_shard, "model-2.safetensors cannot be read: No such file or directory"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("break_it", "told"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_that_cannot_be_read_is_told_in_a_line_with_its_file(
    tmp_path: Path, break_it: Callable[[Path], None], told: str
) -> None:
    folder = make_tiny(tmp_path / "tiny")
    break_it(folder)
    row = next(each for each in findings(Config(model=ModelConfig(path=str(folder)))) if each.what == "model")
    assert row.verdict is Verdict.BAD
    assert row.text.startswith(f"{folder}/{told}")
    assert row.text.endswith("; choose another model, or copy all of this one there again")
    with pytest.raises(Misconfigured) as caught:
        model_path(str(folder))
    assert str(caught.value) == row.text


def test_a_damaged_one_that_was_fetched_is_mended_by_another_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other_config(make_tiny(models_root() / DEFAULT_MODEL))
    with pytest.raises(Misconfigured, match=r"is of no model: .*; run: kvrelay model fetch$"):
        model_path()


def test_who_needs_no_weights_needs_a_configuration_all_the_same(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    cut_weights(folder)
    unknown_architecture(folder)
    assert model_path(str(folder), weights=False) == folder.resolve()
    cut_config(folder)
    with pytest.raises(Misconfigured, match="is damaged"):
        model_path(str(folder), weights=False)


def test_the_doctor_wants_no_model_for_mock_workers() -> None:
    row = next(each for each in findings(Config(mock=MockConfig(enabled=True))) if each.what == "model")
    assert (row.verdict, row.text) == (Verdict.GOOD, "none is needed: mock workers serve one that is made up")


def test_a_model_that_brings_its_own_code_is_left_to_the_engine(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    settings = json.loads((folder / "config.json").read_text()) | {"architectures": ["FooForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModelForCausalLM": "foo.Foo"}}))
    assert model_path(str(folder)) == folder.resolve()


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel", "LlamaModel", "MistralForCausalLM"]
)
def test_what_vllm_or_transformers_have_may_be_served(name: str) -> None:
    assert may_be_served(name)


def test_where_the_names_are_not_to_be_found_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_NAMES", {"vllm": "no/such/file.py"})
    assert may_be_served("FooForCausalLM")
