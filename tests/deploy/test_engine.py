"""Tests of deploy/engine.py: the command and the environment of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvrelay.config import Config, ConnectorConfig, ModelConfig, WorkerConfig
from kvrelay.deploy.engine import EngineSpec, engine_command, engine_environment, engine_spec
from kvrelay.errors import Misconfigured

SPEC = EngineSpec(model_path=Path("/models/m"), served_name="m", port=8101, cpus=(1, 2))
CONNECTOR = ConnectorConfig(
    worker="prefill-0",
    incarnation="1",
    store_socket="/run/store.sock",
    key_file="/run/key",
    engine_file="/run/engine.json",
    weights="abc",
    page_tokens=32,
    load_wait_s=2.0,
)
BUDGET_FLAG, SHARED_FLAG = "--max-num-batched-tokens", "--long-prefill-token-threshold"


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_an_engine_listens_on_loopback_only() -> None:
    assert value(engine_command(SPEC), "--host") == "127.0.0.1"
    assert engine_environment(SPEC, {})["VLLM_HOST_IP"] == "127.0.0.1"


def test_a_plain_engine_has_no_connector_and_asks_for_no_key() -> None:
    assert not {"--kv-transfer-config", "--middleware"} & set(engine_command(SPEC))


def test_an_engine_with_a_connector_guards_its_paths_with_a_key_that_no_command_line_shows() -> None:
    spec = msgspec.structs.replace(SPEC, connector=CONNECTOR)
    assert value(engine_command(spec), "--middleware") == "kvrelay.deploy.engine_guard.EngineGuard"
    assert engine_environment(spec, {"VLLM_API_KEY": "secret"}, "derived")["VLLM_API_KEY"] == "derived"


def test_the_connector_gets_its_settings_and_damaged_pages_are_recomputed() -> None:
    command = engine_command(msgspec.structs.replace(SPEC, connector=CONNECTOR))
    transfer = json.loads(value(command, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_module_path"] == "kvrelay.connector.vllm"
    assert msgspec.convert(transfer["kv_connector_extra_config"]["kvrelay"], ConnectorConfig) == CONNECTOR


def test_sizes_are_left_to_the_engine_unless_given() -> None:
    assert not {"--max-model-len", "--block-size"} & set(engine_command(SPEC))
    command = engine_command(msgspec.structs.replace(SPEC, max_model_len=2048, block_tokens=64))
    assert value(command, "--max-model-len") == "2048"
    assert value(command, "--block-size") == "64"


def test_a_long_prompt_leaves_room_in_a_step_for_others_and_takes_all_of_it_when_told() -> None:
    spec = engine_spec(Config(), Path("/models/m"), port=1, cpus=(0,))
    shared, budget = (int(value(engine_command(spec), flag)) for flag in (SHARED_FLAG, BUDGET_FLAG))
    assert 0 < shared < budget
    greedy = engine_spec(Config(worker=WorkerConfig(shared_chunk_tokens=0)), Path("/models/m"), port=1, cpus=(0,))
    assert value(engine_command(greedy), SHARED_FLAG) == "0"


def test_what_one_prompt_may_take_is_never_more_than_the_longest_prompt() -> None:
    config = Config(worker=WorkerConfig(shared_chunk_tokens=64, max_model_len=48))
    assert value(engine_command(engine_spec(config, Path("/models/m"), port=1, cpus=(0,))), SHARED_FLAG) == "48"


def test_a_block_size_that_the_engine_lacks_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"block_tokens is 48; .* multiple of 32"):
        engine_command(msgspec.structs.replace(SPEC, block_tokens=48))


def test_settings_of_a_shell_do_not_reach_the_engine() -> None:
    shell = {"VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_API_KEY": "secret", "PATH": "/bin"}
    environment = engine_environment(SPEC, shell)
    assert not {"VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY"} & set(environment)
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "1,2"
    assert environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"), [((1, 2), 2, "1|2"), ((0, 1, 2, 3), 2, "0,1|2,3"), ((0, 1), 4, "0|1|0|1")]
)
def test_ranks_split_the_cores_of_their_engine(cpus: tuple[int, ...], ranks: int, expected: str) -> None:
    spec = msgspec.structs.replace(SPEC, cpus=cpus, tensor_parallel=ranks)
    assert value(engine_command(spec), "--tensor-parallel-size") == str(ranks)
    assert engine_environment(spec, {})["VLLM_CPU_OMP_THREADS_BIND"] == expected


def test_the_configuration_reaches_the_engine() -> None:
    config = Config(
        model=ModelConfig(dtype="float32", name="chat"),
        worker=WorkerConfig(kv_cache_bytes=123, max_batched_tokens=64, on_bad_page="fail", tensor_parallel=2),
    )
    spec = engine_spec(config, Path("/models/m"), port=1, cpus=(0,))
    assert (spec.served_name, spec.dtype, spec.kv_cache_bytes) == ("chat", "float32", 123)
    assert (spec.max_batched_tokens, spec.on_bad_page, spec.tensor_parallel) == (64, "fail", 2)
    assert engine_spec(Config(), Path("/models/m"), port=1, cpus=(0,)).served_name == "m"
