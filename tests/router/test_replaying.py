"""Answers that are more than text, cut off: tool calls, reasoning, grammars. A parser has to see all of them again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.policy.recover import Manner
from kvrelay.router.defaults import Defaults
from kvrelay.router.request import Kind, parse
from kvrelay.router.resumable import manner_of
from tests.router.scripted_fleet import CHAT, TEXT, USAGE, Fleet, Heard, running

TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "look_up"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}


@pytest.fixture
async def fleet(model_folder: Path) -> AsyncIterator[Fleet]:
    """Its workers can force tokens."""
    async with running(model_folder, replays=True) as fleet:
        yield fleet


def said(answer: Heard) -> tuple[object, ...]:
    """All that a client makes of an answer, however it was cut into pieces."""
    calls = {key: "".join(call.get(key, "") for call in answer.calls) for key in ("name", "arguments")}
    written = [usage["completion_tokens"] for usage in answer.usages]
    return answer.texts, answer.reasoning, calls, answer.finishes, written, answer.last


async def equals_whatever_is_cut(fleet: Fleet, **body: Any) -> Heard:
    """The undisturbed answer, which all those that lose their worker equal."""
    calm = await fleet.ask(messages=CHAT, **USAGE, **body)
    for after in range(1, len(fleet.script.ids), 3):
        fleet.script.after = after
        assert said(await fleet.ask(messages=CHAT, **USAGE, **body)) == said(calm), after
    assert fleet.script.struck > 5
    assert await fleet.resumes("failed") == 0
    return calm


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [NAMED, {"tool_choice": "required"}, {"tool_choice": "auto"}], ids=["named", "required", "auto"]
)
async def test_a_tool_call_goes_on_where_it_was_cut(fleet: Fleet, choice: dict[str, Any]) -> None:
    calm = await equals_whatever_is_cut(fleet, **TOOLS, **choice)
    assert "".join(call["arguments"] for call in calm.calls) == TEXT
    assert [call["name"] for call in calm.calls if "name" in call] == ["look_up"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (TOOLS, Manner.REPLAY),
        (TOOLS | {"tool_choice": "auto"}, Manner.REPLAY),
        (TOOLS | {"tool_choice": "none"}, Manner.CONTINUE),
        ({"tools": []}, Manner.CONTINUE),
    ],
)
def test_words_that_may_become_a_tool_call_are_shown_to_a_parser_from_the_first(
    asked: dict[str, Any], expected: Manner
) -> None:
    request = parse(Kind.CHAT, json.dumps({"messages": CHAT, "stream": True} | asked).encode())
    assert manner_of(request, Defaults(), has_ids=True, replays=True) is expected


async def test_a_tool_call_that_the_next_worker_cuts_into_other_pieces_ends_in_an_error(fleet: Fleet) -> None:
    fleet.script.again_joins, fleet.script.after = True, 8
    assert (await fleet.ask(messages=CHAT, **TOOLS, **NAMED)).last == b"data: [DONE]"
    fleet.script.after = 7
    cut = await fleet.ask(messages=CHAT, **TOOLS, **NAMED)
    assert b'"code":502' in cut.last
    assert TEXT.startswith("".join(call["arguments"] for call in cut.calls)), "and nothing of it is said twice"


@pytest.mark.slow
@pytest.mark.parametrize("reasons", [1, 12, 20])
async def test_reasoning_and_what_follows_it_go_on_where_they_were_cut(fleet: Fleet, reasons: int) -> None:
    fleet.script.reasons = reasons
    calm = await equals_whatever_is_cut(fleet)
    assert calm.reasoning == fleet.script.visible(reasons)
    assert calm.reasoning + calm.texts[0] == TEXT


@pytest.mark.parametrize("after", [0, 3, 9])
async def test_reasoning_that_comes_after_words_goes_on(fleet: Fleet, after: int) -> None:
    fleet.script.reasons, fleet.script.reasons_after = 5, 3
    calm = await fleet.ask(messages=CHAT)
    fleet.script.after = after
    cut = await fleet.ask(messages=CHAT)
    if after == 3:
        assert b'"code":502' in cut.last, "nothing told that a parser had to see its beginning"
        assert TEXT.startswith(cut.texts[0])
    else:
        assert said(cut) == said(calm)
    assert fleet.script.struck == 1


async def test_reasoning_ends_in_an_error_where_workers_cannot_force_tokens(model_folder: Path) -> None:
    async with running(model_folder) as fleet:
        fleet.script.reasons, fleet.script.after = 12, 5
        cut = await fleet.ask(messages=CHAT)
        assert b'"code":502' in cut.last


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [{"response_format": SCHEMA}, {"structured_outputs": {"regex": ".*"}}], ids=["schema", "regex"]
)
async def test_an_answer_of_a_grammar_goes_on_where_it_was_cut(fleet: Fleet, body: dict[str, Any]) -> None:
    assert (await equals_whatever_is_cut(fleet, **body)).texts == {0: TEXT}
    bodies = [each for fake in fleet.cluster.workers.values() for each in fake.bodies("/v1/chat/completions")]
    assert all(body.items() <= each.items() for each in bodies), "the next worker obeys it, too"


async def test_plain_chats_go_on_from_their_pages_where_workers_could_replay(fleet: Fleet) -> None:
    await equals_whatever_is_cut(fleet)
    bodies = [each for fake in fleet.cluster.workers.values() for each in fake.bodies("/v1/chat/completions")]
    assert not any("vllm_xargs" in each for each in bodies)
