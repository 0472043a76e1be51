"""Tools behind the router: the parser that an operator names in ``worker.vllm_args`` reads calls out of answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.serving.probe import Probe

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

COLOUR = {"type": "string", "enum": ["red", "green"]}
SCHEMA = {"type": "object", "properties": {"colour": COLOUR}, "required": ["colour"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "paint"}}


async def ask(probe: Probe, choice: object) -> tuple[int, dict[str, Any]]:
    body = {
        "model": probe.cluster.config.model.name,
        "messages": [{"role": "user", "content": "Paint it green."}],
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 300,
    }
    chosen = {} if choice is None else {"tool_choice": choice}
    async with probe.http.post(probe.cluster.url + "/v1/chat/completions", json=body | chosen) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
async def test_a_tool_that_has_to_be_called_is_called(shaped: Probe, choice: object) -> None:
    status, answer = await ask(shaped, choice)
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert msgspec.json.decode(call["function"]["arguments"])["colour"] in COLOUR["enum"]


@pytest.mark.parametrize("choice", [None, "auto"], ids=["unsaid", "auto"])
async def test_a_model_may_choose_to_call_none(shaped: Probe, choice: object) -> None:
    status, answer = await ask(shaped, choice)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", [None, "required", NAMED], ids=["unsaid", "required", "named"])
async def test_without_a_parser_the_answer_names_the_flag(probe: Probe, choice: object) -> None:
    status, answer = await ask(probe, choice)
    assert status == 400
    assert "--tool-call-parser" in answer["error"]["message"]
