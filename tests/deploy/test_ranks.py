"""Which numbers of ranks a model folder allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.config import Config, WorkerConfig
from kvrelay.deploy.architecture import Architecture
from kvrelay.deploy.engine import engine_spec
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.ranks import require_ranks
from kvrelay.errors import Misconfigured


def folder_of(path: Path, **settings: int) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    return path


@pytest.mark.parametrize(
    ("heads", "kv_heads", "possible"),
    [(9, 3, {1, 3, 9}), (8, 2, {1, 2, 4, 8}), (12, 4, {1, 2, 4, 12}), (32, 1, {1, 2, 4, 8, 16, 32})],
)
def test_ranks_divide_the_heads_and_they_and_the_kv_heads_divide_one_another(
    tmp_path: Path, heads: int, kv_heads: int, possible: set[int]
) -> None:
    model = Architecture.read(folder_of(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads))
    for ranks in range(1, heads + 2):
        if ranks in possible:
            require_ranks(model, ranks)
        else:
            with pytest.raises(Misconfigured, match=rf"worker\.tensor_parallel: {ranks} ranks .* possible: 1, "):
                require_ranks(model, ranks)


def test_a_model_that_names_no_kv_heads_has_one_for_each_head(tmp_path: Path) -> None:
    model = Architecture.read(folder_of(tmp_path, num_attention_heads=6))
    require_ranks(model, 6)
    with pytest.raises(Misconfigured, match="6 attention heads and 6 KV heads"):
        require_ranks(model, 4)


def test_a_model_that_says_nothing_of_heads_is_left_to_the_engine(tmp_path: Path) -> None:
    require_ranks(Architecture.read(folder_of(tmp_path)), 7)
    require_ranks(Architecture.read(tmp_path / "none"), 7)


async def test_ranks_that_a_model_cannot_have_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, num_attention_heads=9, num_key_value_heads=3)
    config = Config(worker=WorkerConfig(tensor_parallel=2))
    with pytest.raises(Misconfigured, match="2 ranks cannot share"):
        engine_spec(config, folder, port=1, cpus=(0,))
    with pytest.raises(Misconfigured, match="2 ranks cannot share"):
        async with LocalCluster(config, model=folder):
            pass
