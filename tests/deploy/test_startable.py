"""What `kvrelay up` refuses before anything starts, and the doctor says of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.cli.doctor import Verdict, findings
from kvrelay.config import ClusterConfig, Config, MockConfig, StoreConfig, WorkerConfig
from kvrelay.config_text import parse
from kvrelay.deploy import cores
from kvrelay.deploy.architecture import Architecture
from kvrelay.deploy.kv_room import require_room
from kvrelay.deploy.startable import require_cluster, require_sound
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.errors import Misconfigured
from kvrelay.types import Role

LACKING = max(cores.available()) + 1
REFUSED = [
    ("[tenants.silver]\n", "tenants.silver: it has no key in router.api_keys"),
    ("[router]\napi_keys = ['gold:']\n", "router.api_keys: the key of 'gold' is empty"),
    ("[router]\napi_keys = ['a:K1', 'b:K1']\n", "router.api_keys: the same key is there twice"),
    ("[cluster]\nprefill = 0\ndecode = 0\n", "cluster.prefill, cluster.decode: 0 and 0; a cluster needs at least one"),
    ("[cluster]\nprefill = 0\n", "cluster.prefill, cluster.decode: 0 and 1; a cluster needs at least one"),
    ("[cluster]\ndecode = 0\n", "cluster.prefill, cluster.decode: 1 and 0; a cluster needs at least one"),
    ("[worker]\ncpus = 'abc'\n", "worker.cpus is 'abc'; write cores like"),
    (f"[worker]\ncpus = '{LACKING}'\n", f"worker.cpus: {LACKING} cannot be used here"),
    (
        f"[worker]\ncpus = '{LACKING}-{LACKING + 98}'\n",
        f"worker.cpus: {LACKING}-{LACKING + 98} cannot be used here; the cores of this process are "
        + cores.ranges(cores.available()),
    ),
    ("[worker]\nvllm_args = ['--gpu-memory-utilization=0.5']\n", "worker.vllm_args has --gpu-memory-utilization"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("toml", "text"), REFUSED)
def test_what_a_start_refuses_the_doctor_calls_bad(toml: str, text: str) -> None:
    found = next(each for each in findings(parse(toml)) if each.what == "configuration")
    assert found.verdict is Verdict.BAD
    assert found.text.startswith(text)


def test_the_example_of_everything_fits_together() -> None:
    config = parse("[router]\napi_keys = ['gold:K']\n[tenants.gold]\nshare = 2.0\n")
    require_sound(config)
    require_cluster(config)


def test_mock_workers_need_no_cores_and_no_flags_of_an_engine() -> None:
    require_sound(Config(mock=MockConfig(enabled=True), worker=WorkerConfig(cpus=str(LACKING))))


def test_a_file_for_one_worker_describes_no_cluster_to_the_doctor() -> None:
    config = Config(worker=WorkerConfig(role=Role.PREFILL), cluster=ClusterConfig(prefill=0, decode=0))
    assert findings(config)[0].verdict is Verdict.GOOD


def test_a_role_for_all_workers_of_a_cluster_is_refused_with_what_to_use_instead() -> None:
    for role in Role:
        with pytest.raises(Misconfigured, match=r"worker\.role .*--prefill, --decode, --colocated"):
            require_cluster(Config(worker=WorkerConfig(role=role)))


def test_an_address_of_one_worker_is_refused_in_a_cluster() -> None:
    with pytest.raises(Misconfigured, match=r"worker\.advertise names one worker"):
        require_cluster(Config(worker=WorkerConfig(advertise="127.0.0.1:1")))


def test_rounding_in_a_cluster_whose_pages_go_nowhere_is_refused() -> None:
    rounding = StoreConfig(lossy_codec="int8")
    with pytest.raises(Misconfigured, match=r"store\.lossy_codec"):
        require_cluster(Config(store=rounding))
    require_cluster(Config(store=rounding, cluster=ClusterConfig(stores=2)))


def test_one_peer_address_for_two_stores_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"store\.peer_port"):
        require_cluster(Config(cluster=ClusterConfig(stores=2), store=StoreConfig(peer_port=7000)))


def test_settings_of_mock_workers_that_nobody_asked_for_are_refused() -> None:
    with pytest.raises(Misconfigured, match=r"mock\.enabled"):
        require_cluster(Config(mock=MockConfig(time_scale=0.5)))


def test_a_kv_cache_without_room_for_the_longest_request_is_refused_with_what_is_enough(tmp_path: Path) -> None:
    model = Architecture.read(make_tiny(tmp_path / "tiny", TinyShape()))
    with pytest.raises(
        Misconfigured, match=r"worker\.kv_cache_bytes: 1 holds no request of .* give at least (\d+)"
    ) as it:
        require_room(model, Config(worker=WorkerConfig(kv_cache_bytes=1)))
    enough = int(str(it.value).split("at least ")[1].split(",")[0])
    require_room(model, Config(worker=WorkerConfig(kv_cache_bytes=enough)))
    with pytest.raises(Misconfigured):
        require_room(model, Config(worker=WorkerConfig(kv_cache_bytes=enough - 1)))
    require_room(model, Config(worker=WorkerConfig(kv_cache_bytes=enough // 2, max_model_len=16)))


EQUAL_LAYERS = Architecture(
    name="m", num_hidden_layers=2, num_attention_heads=2, head_dim=4, max_position_embeddings=16
)


@pytest.mark.parametrize("layer_types", [None, ["full_attention", "full_attention"]])
def test_layers_of_one_kind_need_room_whether_they_are_listed_or_not(layer_types: list[str] | None) -> None:
    model = msgspec.structs.replace(EQUAL_LAYERS, layer_types=layer_types)
    with pytest.raises(Misconfigured, match="give at least 1024, "):
        require_room(model, Config(worker=WorkerConfig(kv_cache_bytes=1023)))


@pytest.mark.parametrize(
    "part",
    [{"layer_types": ["full_attention", "sliding_attention"]}, {"sliding_window": 8}, {"kv_lora_rank": 4}],
    ids=str,
)
def test_a_model_whose_layers_keep_unlike_parts_is_left_to_the_engine(part: dict[str, Any]) -> None:
    require_room(msgspec.structs.replace(EQUAL_LAYERS, **part), Config(worker=WorkerConfig(kv_cache_bytes=1)))
