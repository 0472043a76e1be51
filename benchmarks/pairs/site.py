"""Unlike engines at one store, without a router: tests and benchmarks ask for each leg of a hand-off themselves."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvrelay.config import Config, ModelConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.server import EngineServer, engine_server, write_to
from kvrelay.deploy.worker import WorkerPlan, read_engine, worker_engine
from kvrelay.protocol.engine import DecodeLeg, Handoff, PrefillLeg, engine_key, handoff_params
from kvrelay.store.daemon import run_store
from kvrelay.types import Engine, Role

KEY = b"k" * 32
START_WAIT_S = 400.0
LOAD_WAIT_S = 30.0
"""Seven ranks on two cores leave one of them without a core for seconds; what they load is asked here, not when."""


@dataclass(frozen=True)
class Kind:
    """What sets one engine apart from the others."""

    tensor_parallel: int = 1
    block_tokens: int = 128
    dtype: str = "float32"
    cpus: str = ""
    """Cores to pin it to; all when empty."""
    kv_cache_bytes: int = 8 << 20
    load_wait_s: float = LOAD_WAIT_S
    on_bad_page: str = "recompute"

    @property
    def name(self) -> str:
        ending = "" if self.on_bad_page == "recompute" else f"-{self.on_bad_page}"
        return f"tp{self.tensor_parallel}-block{self.block_tokens}-{self.dtype}{ending}"

    def config(self) -> Config:
        return Config(
            model=ModelConfig(dtype=self.dtype, name="tiny"),
            worker=WorkerConfig(
                tensor_parallel=self.tensor_parallel,
                block_tokens=self.block_tokens,
                kv_cache_bytes=self.kv_cache_bytes,
                cpus=self.cpus,
                max_batched_tokens=128,
                max_model_len=1024,
                load_wait_s=self.load_wait_s,
                on_bad_page=self.on_bad_page,
            ),
        )


class Site:
    """One node: a store and its engines, by kind."""

    def __init__(self, folder: Path, model: Path, http: aiohttp.ClientSession) -> None:
        self._folder = folder
        self._key_file, self._socket = folder / "key", folder / "store.sock"
        self.model = model
        self._http = http
        self._urls: dict[Kind, str] = {}
        self.engines: dict[Kind, Engine] = {}

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {engine_key(KEY)}"}

    @contextlib.asynccontextmanager
    async def open(self, kinds: list[Kind]) -> AsyncIterator[Site]:
        """Run the store and one engine of each kind; all start at once."""
        self._key_file.write_bytes(KEY)
        config = Config(store=StoreConfig(arena_bytes=256 << 20))
        store = asyncio.create_task(run_store(config, name="s", socket_path=self._socket, key=KEY, routers=()))
        try:
            async with contextlib.AsyncExitStack() as stack:
                servers = [await stack.enter_async_context(self._engine(kind)) for kind in kinds]
                await asyncio.gather(*(server.wait_serving(START_WAIT_S) for server in servers))
                for kind in kinds:
                    self.engines[kind] = read_engine(self._engine_file(kind))
                yield self
        finally:
            store.cancel()
            await asyncio.gather(store, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _engine(self, kind: Kind) -> AsyncIterator[EngineServer]:
        plan = WorkerPlan(
            name=kind.name,
            role=Role.BOTH,
            model_path=self.model,
            routers=(),
            store="s",
            store_socket=self._socket,
            key_file=self._key_file,
        )
        spec = worker_engine(kind.config(), plan, secrets.token_hex(4), self._engine_file(kind))
        with (self._folder / f"{kind.name}.log").open("wb") as log:
            async with engine_server(spec, write_to(log), api_key=engine_key(KEY)) as engine:
                self._urls[kind] = engine.url
                yield engine

    def _engine_file(self, kind: Kind) -> Path:
        return self._folder / f"{kind.name}.json"

    def url(self, kind: Kind) -> str:
        return self._urls[kind]

    async def ask(self, kind: Kind, ids: list[int], leg: Handoff | None = None, **fields: Any) -> dict[str, Any]:
        """One greedy completion of ``kind``'s engine; its first choice."""
        body = {"model": "tiny", "prompt": ids, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
        if leg is not None:
            body["kv_transfer_params"] = handoff_params(leg)
        async with self._http.post(f"{self._urls[kind]}/v1/completions", json=body, headers=self.headers) as response:
            assert response.status == 200, await response.text()
            choice: dict[str, Any] = (await response.json())["choices"][0]
            return choice

    async def hand_over(self, prefill: Kind, decode: Kind, ids: list[int], **fields: Any) -> dict[str, Any]:
        """What ``decode`` answers from the pages that ``prefill`` wrote."""
        transfer = secrets.token_hex(4)
        dtypes = [prefill.dtype] if prefill.dtype != decode.dtype else []
        legs = PrefillLeg(transfer=transfer, push_to=None), DecodeLeg(transfers=[transfer], page_dtypes=dtypes)
        await self.ask(prefill, ids, legs[0], max_tokens=1)
        return await self.ask(decode, ids, legs[1], **fields)
