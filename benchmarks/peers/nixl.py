"""vLLM's own hand-off over NIXL, pulled by D or pushed by P: two engines, and the part of a proxy that joins them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.answers import Answer, completion, stream, whole
from benchmarks.peers.environment import NIXL, peer_python
from benchmarks.progress import Say
from benchmarks.split import Handed, config
from kvrelay.deploy.engine import EngineSpec, engine_command, engine_environment, engine_spec
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.process import Child
from kvrelay.deploy.server import HEALTH_TIMEOUT_S, EngineServer, write_to

_ROOT = Path(__file__).resolve().parents[2]
_MODULE = "benchmarks.peers.nixl_engine"
_START_WAIT_S = 240.0
_VLLM_BUDGET_TOKENS = 2048
"""vLLM 0.32's default for a server on CPU (``EngineArgs.get_batch_defaults``)."""
_ROLES = ("kv_producer", "kv_consumer")
_REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's proxies send to P."""


class Direction(StrEnum):
    """Who moves the KV; the value is vLLM's name for the connector."""

    PULL = "NixlConnector"
    PUSH = "NixlPushConnector"


class Nixl:
    """A prefill and a decode engine of stock vLLM."""

    def __init__(self, prefill_url: str, decode_url: str, http: aiohttp.ClientSession) -> None:
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._http = http

    def __repr__(self) -> str:
        return f"<Nixl {self._prefill_url} to {self._decode_url}>"

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Handed:
        """P first, then D with what P returned, as vLLM's proxies do.

        Both get one request id: a push finds D's blocks by it, and waits for ever without.
        """
        request_id = uuid.uuid4().hex
        sent_s = time.monotonic()
        body = completion(prompt, 1, kv_transfer_params=_REMOTE_DECODE)
        params = (await whole(self._http, self._prefill_url, body, request_id))["kv_transfer_params"]
        answered_s = time.monotonic()
        body = completion(prompt, max_tokens, kv_transfer_params=params)
        answer = await stream(self._http, self._decode_url, body, request_id)
        return Handed(
            answer=msgspec.structs.replace(answer, sent_s=sent_s),
            prefill_s=answered_s - sent_s,
            gap_s=answer.token_s[0] - answered_s,
        )

    async def decode_only(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        return await stream(self._http, self._decode_url, completion(prompt, max_tokens))


@contextlib.asynccontextmanager
async def nixl(direction: Direction, say: Say) -> AsyncIterator[Nixl]:
    """Both engines, each on a core of its own, with vLLM's own scheduling."""
    python = peer_python("nixl", NIXL, say)
    model = fetch()
    wanted = config(max_batched_tokens=_VLLM_BUDGET_TOKENS, shared_chunk_tokens=0)
    specs = [engine_spec(wanted, model, port=free_port(), cpus=(core,)) for core in (0, 1)]
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(_engine(spec, direction, role, python, Path(folder) / f"{role}.log"))
                for spec, role in zip(specs, _ROLES, strict=True)
            ]
            await asyncio.gather(*(engine.wait_serving(_START_WAIT_S) for engine in engines))
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
            yield Nixl(engines[0].url, engines[1].url, http)


@contextlib.asynccontextmanager
async def _engine(
    spec: EngineSpec, direction: Direction, role: str, python: Path, log: Path
) -> AsyncIterator[EngineServer]:
    transfer = {"kv_connector": direction.value, "kv_role": role, "kv_buffer_device": "cpu"}
    flags = engine_command(spec)[3:]  # past the interpreter, -m and our own module
    command = [str(python), "-m", _MODULE, *flags, "--kv-transfer-config", json.dumps(transfer)]
    environment = engine_environment(spec, os.environ) | {
        "PYTHONPATH": str(_ROOT),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    with log.open("wb") as output:
        child = await Child.start("peer", command, environment, asyncio.subprocess.PIPE)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            engine = EngineServer(spec, child, http, quote_log=True)
            relay = asyncio.create_task(engine.relay_log(write_to(output)))
            try:
                yield engine
            finally:
                await asyncio.shield(engine.stop())
                relay.cancel()
                await asyncio.gather(relay, return_exceptions=True)
