"""Tests of deploy/weights.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.deploy.weights import weights_digest
from kvrelay.errors import Misconfigured


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_copy_has_the_same_digest_and_other_weights_another(tmp_path: Path) -> None:
    first = make_tiny(tmp_path / "first")
    copy = shutil.copytree(first, tmp_path / "copy")
    other = make_tiny(tmp_path / "other", TinyShape(seed=9))
    assert weights_digest(first) == weights_digest(copy)
    assert weights_digest(first) != weights_digest(other)
    assert len(weights_digest(first)) == 32


def test_a_change_of_the_files_changes_the_digest_although_it_is_remembered(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    before = weights_digest(folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights_digest(folder) != before


def test_a_change_of_the_configuration_changes_the_digest(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    before = weights_digest(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert weights_digest(folder) != before


def test_the_tokenizer_is_no_part_of_the_weights(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    before = weights_digest(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    assert weights_digest(folder) == before


def note_in(cache: Path) -> Path:
    """The one note of what a digest was."""
    (note,) = (cache / "kvrelay" / "digests").iterdir()
    return note


def test_a_known_folder_is_not_read_again(tmp_path: Path, cache: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    digest = weights_digest(folder)
    stamp = note_in(cache).read_text().removesuffix(f" {digest}\n")
    note_in(cache).write_text(f"{stamp} {'7' * 32}")
    assert weights_digest(folder) == "7" * 32


@pytest.mark.parametrize("in_place", [True, False])
def test_other_weights_of_the_same_size_and_time_have_another_digest(tmp_path: Path, *, in_place: bool) -> None:
    folder = make_tiny(tmp_path / "model")
    before = weights_digest(folder)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    target = weights if in_place else folder / "draft"
    target.write_bytes(bytes(stat.st_size))
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    while target.stat().st_ctime_ns == stat.st_ctime_ns:  # the kernel's clock for files takes milliseconds to move
        target.touch()
        os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    target.replace(weights)
    assert weights_digest(folder) != before


def test_a_note_that_is_something_else_is_replaced(tmp_path: Path, cache: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    before = weights_digest(folder)
    note_in(cache).write_bytes(b"\xff\xfe\x00")
    assert weights_digest(folder) == before
    assert before in note_in(cache).read_text()


def test_a_digest_needs_no_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(weights_digest(make_tiny(tmp_path / "model"))) == 32


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, missing: str) -> None:
    folder = make_tiny(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(Misconfigured, match="no model folder"):
        weights_digest(folder)
