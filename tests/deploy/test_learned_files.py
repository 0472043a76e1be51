"""What ``kvrelay up`` keeps of its routers' experience, and for whom."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kvrelay.config import ClusterConfig, Config, MockConfig, ModelConfig, RouterConfig, StoreConfig
from kvrelay.deploy import learned_files
from kvrelay.deploy.learned_files import keeping
from kvrelay.fleet.experience import Learned

PLAIN = Config(model=ModelConfig(path="/models/one"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvrelay" / "learned"


def kept(config: Config) -> Path:
    return Path(keeping(config).router.learned_file)


def test_the_same_set_up_has_the_same_file_whatever_its_ports_and_pools(cache: Path) -> None:
    alike = replace(PLAIN, router=RouterConfig(port=1234), cluster=ClusterConfig(prefill=3))
    assert kept(PLAIN) == kept(alike)
    assert kept(PLAIN).parent == cache


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, model=ModelConfig(path="/models/two")),
        replace(PLAIN, store=StoreConfig(streams=1)),
        replace(PLAIN, cluster=ClusterConfig(stores=2)),
    ],
    ids=["model", "store", "stores"],
)
def test_what_is_set_up_in_another_way_has_a_file_of_its_own(other: Config) -> None:
    assert kept(other) != kept(PLAIN)


@pytest.mark.parametrize(
    "config",
    [replace(PLAIN, router=RouterConfig(learned_file="mine.json")), replace(PLAIN, mock=MockConfig(enabled=True))],
    ids=["named", "simulated"],
)
def test_a_file_that_is_named_stands_and_simulated_workers_have_none(config: Config) -> None:
    assert keeping(config) is config


def test_what_was_learned_is_left_as_it_is() -> None:
    path = kept(PLAIN)
    path.write_bytes(msgspec.json.encode(Learned(handoffs=7)))
    assert kept(PLAIN) == path
    assert msgspec.json.decode(path.read_bytes(), type=Learned).handoffs == 7


@pytest.mark.parametrize("words", [b"", b"{", b'{"kinds": 3}', b"[" * 100_000], ids=["empty", "cut", "other", "deep"])
def test_what_cannot_be_read_is_begun_anew(words: bytes) -> None:
    path = kept(PLAIN)
    path.write_bytes(words)
    assert kept(PLAIN) == path
    assert not path.exists()


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert keeping(PLAIN) is PLAIN


def test_the_set_ups_that_were_not_used_for_longest_are_forgotten(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_files, "MAX_FILES", 3)
    cache.mkdir(parents=True)
    for age in range(5):
        (cache / f"{age}.json").write_text("{}")
        os.utime(cache / f"{age}.json", (1000 - age, 1000 - age))
    kept(PLAIN).write_text("{}")
    assert sorted(path.name for path in cache.iterdir() if path != kept(PLAIN)) == ["0.json", "1.json"]


def test_what_a_router_that_died_began_to_write_is_removed_a_day_later(cache: Path) -> None:
    cache.mkdir(parents=True)
    old, new = cache / "0.json.17.tmp", cache / "0.json.18.tmp"
    for partial in (old, new):
        partial.write_text("{")
    os.utime(old, (1000, 1000))
    keeping(PLAIN)
    assert list(cache.iterdir()) == [new]
