"""Command line and environment of one stock vLLM server on CPU, with kvrelay's connector or without any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvrelay.channel import reachable
from kvrelay.config import BLOCK_MULTIPLE, Config, ConnectorConfig
from kvrelay.connector.engine import REPLAY
from kvrelay.deploy import cores
from kvrelay.deploy.architecture import Architecture
from kvrelay.deploy.engine_guard import API_KEY_VARIABLE, EngineGuard
from kvrelay.deploy.engine_main import CPUS_VARIABLE
from kvrelay.deploy.event_relay import publish
from kvrelay.deploy.interpreter import python_module
from kvrelay.deploy.ranks import require_ranks
from kvrelay.deploy.vllm_args import require_allowed
from kvrelay.errors import Misconfigured
from kvrelay.types import Value


class EngineSpec(Value, frozen=True, kw_only=True):
    """What one engine serves, where, and on which cores."""

    model_path: Path
    served_name: str
    port: int
    cpus: tuple[int, ...]
    """Cores to pin it to."""
    tensor_parallel: int = 1
    """Ranks that share the model, and the cores."""
    host: str = "127.0.0.1"
    """Address that it listens at."""
    dtype: str = "auto"
    kv_cache_bytes: int = 1 << 30
    max_batched_tokens: int = 512
    shared_chunk_tokens: int = 0
    """0: a long prompt may take the whole budget of every step."""
    max_model_len: int = 0
    """0: the model's own."""
    block_tokens: int = 0
    """0: vLLM's own (128 on CPU)."""
    on_bad_page: str = "recompute"
    connector: ConnectorConfig | None = None
    """None: a plain, unsplit engine, which asks nobody for a key."""
    events: Path | None = None
    """Folder in which its KV events can be heard; None: it publishes none."""
    extra_flags: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        return f"http://{reachable(self.host)}:{self.port}"


def engine_spec(config: Config, model_path: Path, *, port: int, cpus: tuple[int, ...]) -> EngineSpec:
    """The engine that ``config`` describes, without a connector. Raises ``Misconfigured``."""
    worker = config.worker
    require_ranks(Architecture.read(model_path), worker.tensor_parallel)
    return EngineSpec(
        model_path=model_path,
        served_name=config.model.name or model_path.name,
        port=port,
        cpus=cpus,
        dtype=config.model.dtype,
        tensor_parallel=worker.tensor_parallel,
        kv_cache_bytes=worker.kv_cache_bytes,
        max_batched_tokens=worker.max_batched_tokens,
        shared_chunk_tokens=worker.shared_chunk_tokens,
        max_model_len=worker.max_model_len,
        block_tokens=worker.block_tokens,
        on_bad_page=worker.on_bad_page,
        extra_flags=require_allowed(worker.vllm_args),
    )


def engine_command(spec: EngineSpec) -> list[str]:
    """The command that starts ``spec``. Raises ``Misconfigured``."""
    flags = [
        *("--model", str(spec.model_path)),
        *("--served-model-name", spec.served_name),
        *("--host", spec.host, "--port", str(spec.port)),
        *("--dtype", spec.dtype),
        "--enforce-eager",
        # Bytes, because VLLM_CPU_KVCACHE_SPACE takes whole GiB only; it also skips a check that counts all free memory.
        *("--kv-cache-memory-bytes", str(spec.kv_cache_bytes)),
        *("--max-num-batched-tokens", str(spec.max_batched_tokens)),
        *("--tensor-parallel-size", str(spec.tensor_parallel)),
        *("--long-prefill-token-threshold", str(_shared_chunk_tokens(spec))),
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        *_sizes(spec),
        *_transfer(spec),
        *_order(spec),
        *(("--kv-events-config", publish(spec.events)) if spec.events else ()),
        *spec.extra_flags,
    ]
    return python_module("kvrelay.deploy.engine_main", *flags)


def _order(spec: EngineSpec) -> list[str]:
    """A plain engine is to be stock, and where one prompt may take whole steps, the operator wants them in order."""
    if spec.connector is None or not spec.shared_chunk_tokens:
        return []
    return ["--scheduler-cls", "kvrelay.connector.short_first.ShortFirst"]


def _shared_chunk_tokens(spec: EngineSpec) -> int:
    """vLLM refuses a limit that no prompt can reach."""
    return min(spec.shared_chunk_tokens, spec.max_model_len or spec.shared_chunk_tokens)


def _sizes(spec: EngineSpec) -> list[str]:
    if spec.block_tokens % BLOCK_MULTIPLE:
        raise Misconfigured(
            f"worker.block_tokens is {spec.block_tokens}; on CPU it must be a multiple of {BLOCK_MULTIPLE}"
        )
    flags = ["--max-model-len", str(spec.max_model_len)] if spec.max_model_len else []
    return flags + (["--block-size", str(spec.block_tokens)] if spec.block_tokens else [])


def _transfer(spec: EngineSpec) -> list[str]:
    if spec.connector is None:
        return []
    transfer = {
        "kv_connector": "KvrelayConnector",
        "kv_connector_module_path": "kvrelay.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": spec.on_bad_page,
        "kv_connector_extra_config": {"kvrelay": msgspec.to_builtins(spec.connector)},
    }
    guard = f"{EngineGuard.__module__}.{EngineGuard.__qualname__}"
    return ["--kv-transfer-config", json.dumps(transfer), "--middleware", guard, "--logits-processors", REPLAY]


def engine_environment(spec: EngineSpec, base: Mapping[str, str], api_key: str = "") -> dict[str, str]:
    """``base`` with what vLLM must be told through variables; a key of the caller's own shell is no engine's."""
    environment = {
        **base,
        CPUS_VARIABLE: _list(spec.cpus),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(_list, cores.deal(spec.cpus, spec.tensor_parallel))),
        # "auto" wants one NUMA node a rank and keeps cores for itself: unusable on a small machine.
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The engine runs eagerly; what is left to compile is a line of the sampler, which stops every stream of the
        # worker for 20 s when the first request asks for logprobs, and needs a C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    for legacy in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS", API_KEY_VARIABLE):
        environment.pop(legacy, None)  # the first overrides --kv-cache-memory-bytes; the second may hide the platform
    return environment | ({API_KEY_VARIABLE: api_key} if api_key else {})


def _list(cpus: tuple[int, ...]) -> str:
    return ",".join(str(cpu) for cpu in cpus)
