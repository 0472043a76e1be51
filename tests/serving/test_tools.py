"""Tools behind the router: the parser that an operator names in ``worker.vllm_args`` reads calls out of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from kvrelay.deploy.local import LocalCluster
from tests.serving import tiny
from tests.serving.probe import Probe

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PARSER = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
COLOUR = {"type": "string", "enum": ["red", "green"]}
SCHEMA = {"type": "object", "properties": {"colour": COLOUR}, "required": ["colour"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "paint"}}


async def ask(probe: Probe, choice: object) -> tuple[int, dict[str, Any]]:
    body = {
        "model": tiny.MODEL,
        "messages": [{"role": "user", "content": "Paint it green."}],
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 300,
    }
    chosen = {} if choice is None else {"tool_choice": choice}
    async with probe.http.post(probe.cluster.url + "/v1/chat/completions", json=body | chosen) as response:
        return response.status, await response.json()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def parsing(tiny_model: Path, http: aiohttp.ClientSession) -> AsyncIterator[Probe]:
    wanted = tiny.config(arena_pages=256, kv_blocks=256, stores=1)
    worker = msgspec.structs.replace(wanted.worker, vllm_args=PARSER, max_model_len=1024)
    async with LocalCluster(msgspec.structs.replace(wanted, worker=worker), model=tiny_model) as cluster:
        yield Probe(cluster, http)


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
async def test_a_tool_that_has_to_be_called_is_called(parsing: Probe, choice: object) -> None:
    status, answer = await ask(parsing, choice)
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert msgspec.json.decode(call["function"]["arguments"])["colour"] in COLOUR["enum"]


@pytest.mark.parametrize("choice", [None, "auto"], ids=["unsaid", "auto"])
async def test_a_model_may_choose_to_call_none(parsing: Probe, choice: object) -> None:
    status, answer = await ask(parsing, choice)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", [None, "required", NAMED], ids=["unsaid", "required", "named"])
async def test_without_a_parser_the_answer_names_the_flag(shaped: Probe, choice: object) -> None:
    status, answer = await ask(shaped, choice)
    assert status == 400
    assert "--tool-call-parser" in answer["error"]["message"]
