"""Tests of deploy/engine.py, and of a real engine through deploy/server.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from kvrelay.config import Config, ConnectorConfig, ModelConfig, WorkerConfig
from kvrelay.deploy.cores import available
from kvrelay.deploy.engine import EngineSpec, engine_command, engine_environment, engine_spec
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.process import Child
from kvrelay.deploy.server import plain_engine
from kvrelay.deploy.tiny import make_tiny
from kvrelay.errors import Lost, Misconfigured

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


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_an_engine_listens_on_loopback_only() -> None:
    assert value(engine_command(SPEC), "--host") == "127.0.0.1"
    assert engine_environment(SPEC, {})["VLLM_HOST_IP"] == "127.0.0.1"


def test_a_plain_engine_has_no_connector() -> None:
    assert "--kv-transfer-config" not in engine_command(SPEC)


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


def test_a_block_size_that_the_engine_lacks_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"block_tokens is 48; .* multiple of 32"):
        engine_command(msgspec.structs.replace(SPEC, block_tokens=48))


def test_settings_of_a_shell_do_not_reach_the_engine() -> None:
    environment = engine_environment(SPEC, {"VLLM_CPU_KVCACHE_SPACE": "40", "PATH": "/bin"})
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "1,2"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_configuration_reaches_the_engine() -> None:
    config = Config(
        model=ModelConfig(dtype="float32", name="chat"),
        worker=WorkerConfig(kv_cache_bytes=123, max_batched_tokens=64, on_bad_page="fail"),
    )
    spec = engine_spec(config, Path("/models/m"), port=1, cpus=(0,))
    assert (spec.served_name, spec.dtype, spec.kv_cache_bytes) == ("chat", "float32", 123)
    assert (spec.max_batched_tokens, spec.on_bad_page) == (64, "fail")
    assert engine_spec(Config(), Path("/models/m"), port=1, cpus=(0,)).served_name == "m"


# ---------------------------------------------------------------- real engines


def tiny_spec(tmp_path: Path, *extra: str) -> EngineSpec:
    return EngineSpec(
        model_path=make_tiny(tmp_path / "tiny"),
        served_name="tiny",
        port=free_port(),
        cpus=available()[-1:],
        dtype="float32",
        kv_cache_bytes=32 << 20,
        extra_flags=extra,
    )


@pytest.mark.vllm
async def test_an_engine_that_dies_while_starting_says_why(tmp_path: Path) -> None:
    with pytest.raises(Lost, match="--no-such-flag") as caught:
        async with plain_engine(tiny_spec(tmp_path, "--no-such-flag"), tmp_path / "log"):
            pytest.fail("it served")
    assert "died while it started (exited with status 2)" in str(caught.value)
    assert "--no-such-flag" in (tmp_path / "log").read_text()


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
import msgspec
from kvrelay.deploy.engine import EngineSpec
from kvrelay.deploy.server import plain_engine
async def main():
    async with plain_engine(msgspec.json.decode(sys.argv[1], type=EngineSpec, dec_hook=lambda _type, text: Path(text)),
                            Path(sys.argv[2])) as engine:
        print(engine.pid, flush=True)
        await engine.wait_death()
asyncio.run(main())
"""


@pytest.mark.vllm
async def test_an_engine_serves_is_pinned_and_dies_with_a_killed_supervisor(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("e")  # short, for unix sockets live in it
    spec = tiny_spec(tmp_path)
    text = msgspec.json.encode(spec, enc_hook=str).decode()
    command = [sys.executable, "-c", SUPERVISOR, text, str(tmp_path / "log")]
    child = await Child.start("supervisor", command, {**os.environ, "TMPDIR": str(scratch)}, asyncio.subprocess.PIPE)
    try:
        assert child.output is not None
        engine = psutil.Process(int(await child.output.readline()))
        tree = [engine, *engine.children(recursive=True)]
        assert [set(process.cpu_affinity()) for process in tree] == [set(spec.cpus)] * len(tree)
        await complete(spec)
        memory = {name for process in tree for name in mapped(process)}
        assert memory
        os.kill(child.pid, signal.SIGKILL)
        _gone, alive = await asyncio.to_thread(psutil.wait_procs, tree, 10)
        assert alive == []
    finally:
        await child.stop(grace_s=1)
    assert [name for name in memory if Path(name).exists()] == []


def mapped(process: psutil.Process) -> set[str]:
    """Files in /dev/shm that a process maps."""
    return {region.path for region in process.memory_maps() if region.path.startswith("/dev/shm/")}


async def complete(spec: EngineSpec) -> None:
    """The engine answers, and its answer depends on the first token of the prompt."""
    async with aiohttp.ClientSession() as http:
        texts = []
        for prompt in ([5, 6, 7] * 20, [8, *([6, 7, 5] * 20)[:59]], [5, 6, 7] * 20):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            async with http.post(f"{spec.url}/v1/completions", json=body) as response:
                answer = await response.json()
            texts.append(answer["choices"][0]["text"])
            assert answer["usage"]["completion_tokens"] == 8
            assert "cached_tokens" in answer["usage"]["prompt_tokens_details"]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]
