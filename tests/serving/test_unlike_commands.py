"""An unlike pair behind a router, started one by one as operators start it: each worker with a file of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvrelay.deploy.key import write_secret
from kvrelay.deploy.ports import PortClaims
from kvrelay.deploy.process import Child
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.protocol.engine import engine_key
from tests.serving.logprobs import assert_close
from tests.serving.probe import prompt_tokens
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

KEY = "k" * 64
START_WAIT_S = 400.0
ROUTER = """
[model]
path = "{model}"
name = "tiny"

[router]
convert_kv_dtype = true
local_prefill = "never"
api_keys = ["acme:secret"]
"""
WORKER = """
[model]
path = "{model}"
name = "tiny"
dtype = "{dtype}"

[worker]
cpus = "{cpus}"
block_tokens = {block_tokens}
kv_cache_bytes = 8388608
max_model_len = 1024
load_wait_s = 30.0
"""


class Site:
    """The four processes of operate.md's unlike pair, and how to ask them."""

    def __init__(self, folder: Path, model: Path, http: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.model = model
        self._http = http
        with PortClaims() as claims:
            self._port, self._control, self.decode_port = (claims.free("127.0.0.1") for _ in range(3))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        write_secret(self.folder / "key", KEY)
        async with contextlib.AsyncExitStack() as stack:
            for number, arguments in enumerate(self._commands()):
                await stack.enter_async_context(self._running(str(number), [*arguments, "--key-file", "key"]))
            await self._until_well()
            yield self

    def _commands(self) -> list[list[str]]:
        router, socket = f"127.0.0.1:{self._control}", ["--store-socket", "node.sock"]
        at = ["--router", router]
        prefill = self._config("prefill", WORKER, dtype="float32", cpus="0", block_tokens=64)
        decode = self._config("decode", WORKER, dtype="bfloat16", cpus=_last_core(), block_tokens=32)
        ports = ["--port", str(self._port), "--control-port", str(self._control)]
        return [
            ["router", *ports, *self._config("router", ROUTER)],
            ["store", "--socket", "node.sock", *at],
            ["worker", *socket, *at, "--role", "prefill", *prefill],
            ["worker", *socket, *at, "--role", "decode", "--port", str(self.decode_port), *decode],
        ]

    def _config(self, name: str, text: str, **values: object) -> list[str]:
        file = self.folder / f"{name}.toml"
        file.write_text(text.format(model=self.model, **values))
        return ["--config", file.name]

    @contextlib.asynccontextmanager
    async def _running(self, name: str, arguments: list[str]) -> AsyncIterator[None]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (self.folder / f"{name}.log").open("wb") as log:
            command = ["env", "-C", str(self.folder), sys.executable, "-m", "kvrelay", *arguments]
            child = await Child.start(name, command, environment, log)
            try:
                yield
            finally:
                await child.stop(20.0)

    async def _until_well(self) -> None:
        async with asyncio.timeout(START_WAIT_S):
            while (health := await self._health()).get("status") != "ok":
                await asyncio.sleep(0.2)
        assert health["unpaired"] == []

    async def _health(self) -> dict[str, Any]:
        try:
            async with self._http.get(f"http://127.0.0.1:{self._port}/health") as response:
                return await response.json()  # type: ignore[no-any-return]
        except aiohttp.ClientConnectionError:
            return {}

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": "Bearer secret"}
        url = f"http://127.0.0.1:{self._port}{path}"
        async with self._http.post(url, json={"model": "tiny", "max_tokens": 8} | body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()  # type: ignore[no-any-return]


def _last_core() -> str:
    return str(max(os.sched_getaffinity(0)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("pair")
    async with Site(folder, make_tiny(folder / "tiny", TinyShape(layers=2)), http).open() as opened:
        yield opened


def top(answer: dict[str, Any]) -> dict[str, float]:
    """Log probabilities of the first token's alternatives."""
    found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


async def test_a_tenants_requests_are_answered_from_converted_pages(site: Site, http: aiohttp.ClientSession) -> None:
    """P computes in float32 and D in bfloat16, so that texts need not be equal; what D thinks of the first token is."""
    decode = f"http://127.0.0.1:{site.decode_port}"
    headers = {"authorization": f"Bearer {engine_key(KEY.encode())}"}
    wanted = {"model": "tiny", "temperature": 0, "logprobs": 20, "return_tokens_as_token_ids": True}
    async with aiohttp.ClientSession(headers=headers) as trusted:
        before = (await prompt_tokens(trusted, decode))["external_kv_transfer"]
        for number, tokens in enumerate((40, 150, 300)):
            body = wanted | {"prompt": token_ids(site.model, tokens, number=number), "max_tokens": 8}
            answer = await site.post("/v1/completions", body)
            async with trusted.post(f"{decode}/v1/completions", json=body | {"cache_salt": "alone"}) as response:
                assert response.status == 200, await response.text()
                assert_close(top(answer), top(await response.json()))
        loaded = (await prompt_tokens(trusted, decode))["external_kv_transfer"] - before
    assert loaded >= 40 + 150 + 300 - 3, "at most each last token is computed"
    chat = await site.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello there."}]})
    assert chat["choices"][0]["message"]["role"] == "assistant"
