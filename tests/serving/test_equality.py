"""Greedy answers through P and D are the unsplit engine's, to the byte, and D computed nothing but each last token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import Role
from tests.serving.conftest import CHUNK, MODEL, Baseline
from tests.serving.probe import Probe
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

BLOCK, PAGE = 128, 32
EDGES = sorted({size * times + delta for size in (BLOCK, PAGE) for times in (1, 2) for delta in (-1, 0, 1)} | {1})
LENGTHS = [*EDGES, CHUNK + 144, 4 * CHUNK + 176]
"""With the two-chunk and the five-chunk prompt."""


def completion(ids: list[int], max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }


async def ask(probe: Probe, route: str, body: dict[str, Any]) -> Any:
    async with probe.http.post(probe.cluster.url + route, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def written(answer: Any) -> list[tuple[str, list[int], str]]:
    return [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]


@pytest.mark.parametrize("tokens", LENGTHS)
async def test_each_length_twice_equals_the_unsplit_engine(
    probe: Probe, baseline: Baseline, model: Path, tokens: int
) -> None:
    body = completion(token_ids(model, tokens, number=tokens))
    expected = await baseline.ask("/v1/completions", body)
    before = await probe.prompt_tokens(Role.DECODE)
    first = await ask(probe, "/v1/completions", body)
    await probe.assert_at_rest()  # what the answer wrote has gone home
    moved = probe.counts()["bytes_received"]
    second = await ask(probe, "/v1/completions", body)
    after = await probe.prompt_tokens(Role.DECODE)

    assert written(first) == written(expected)
    assert written(second) == written(expected)
    computed, outside, local = (
        after[source] - before[source] for source in ("local_compute", "external_kv_transfer", "local_cache_hit")
    )
    assert computed <= 2, "D computes at most the last token of each prompt"
    assert computed + outside + local == 2 * tokens
    assert outside >= tokens - 1, "the first time everything but the last token comes from outside"
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 <= second["usage"]["prompt_tokens_details"]["cached_tokens"] <= tokens
    await probe.assert_at_rest()
    assert probe.counts()["bytes_received"] == moved, "the second time nothing is left to move"


async def test_eight_prompts_at_once_equal_the_unsplit_engine(probe: Probe, baseline: Baseline, model: Path) -> None:
    lengths = [20, 50, 90, 130, 200, 260, 330, 500]
    bodies = [completion(token_ids(model, tokens, number=1000 + tokens)) for tokens in lengths]
    expected = [await baseline.ask("/v1/completions", body) for body in bodies]
    answers = await asyncio.gather(*(ask(probe, "/v1/completions", body) for body in bodies))
    assert [written(answer) for answer in answers] == [written(answer) for answer in expected]
    await probe.assert_at_rest()


async def test_the_second_turn_finds_the_pages_that_the_first_turns_answer_made(
    probe: Probe, baseline: Baseline, model: Path
) -> None:
    turn = token_ids(model, 70, number=77)
    first = completion(turn, max_tokens=80, ignore_eos=True)
    answer = await ask(probe, "/v1/completions", first)
    assert written(answer) == written(await baseline.ask("/v1/completions", first))

    history = turn + answer["choices"][0]["token_ids"]
    # Pages cover prompt and answer but for the last sampled token, which has no KV.
    generated = probe.page_names(history)[len(turn) // PAGE : (len(history) - 1) // PAGE]
    assert len(generated) == 2
    for name in probe.cluster.stores:
        await probe.wait_for_pages(name, generated)

    before = await probe.prompt_tokens(Role.PREFILL)
    second = completion(history + token_ids(model, 40, number=78))
    answer = await ask(probe, "/v1/completions", second)
    assert written(answer) == written(await baseline.ask("/v1/completions", second))
    after = await probe.prompt_tokens(Role.PREFILL)
    reused = (len(history) - 1) // PAGE * PAGE
    assert after["local_compute"] - before["local_compute"] <= len(second["prompt"]) - reused
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= reused
    await probe.assert_at_rest()


async def test_a_chat_of_two_turns_equals_the_unsplit_engine(probe: Probe, baseline: Baseline) -> None:
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Which animal says moo, and why do you think so?"},
    ]
    for turn in range(2):
        body = {"model": MODEL, "messages": messages, "max_tokens": 64, "temperature": 0, "return_token_ids": True}
        ours = await ask(probe, "/v1/chat/completions", body)
        theirs = await baseline.ask("/v1/chat/completions", body)
        words = ours["choices"][0]["message"]["content"]
        assert words == theirs["choices"][0]["message"]["content"]
        assert ours["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]
        assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
        assert (ours["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0)
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": "And which one says meow?"}]
    await probe.assert_at_rest()


@pytest.mark.parametrize("fields", [{"n": 2, "temperature": 0.8, "seed": 7}, {"stop": ["the"]}])
async def test_fields_of_the_user_reach_the_decode_worker_unchanged(
    probe: Probe, baseline: Baseline, model: Path, fields: dict[str, Any]
) -> None:
    body = completion(token_ids(model, 75, number=500), **fields)
    ours, theirs = await ask(probe, "/v1/completions", body), await baseline.ask("/v1/completions", body)
    assert written(ours) == written(theirs)
    await probe.assert_at_rest()


async def test_logprobs_are_those_of_the_unsplit_engine(probe: Probe, baseline: Baseline, model: Path) -> None:
    body = completion(token_ids(model, 75, number=510), logprobs=3)
    ours, theirs = await ask(probe, "/v1/completions", body), await baseline.ask("/v1/completions", body)
    assert written(ours) == written(theirs)
    mine, yours = ours["choices"][0]["logprobs"], theirs["choices"][0]["logprobs"]
    assert mine["tokens"] == yours["tokens"]
    assert mine["token_logprobs"] == pytest.approx(yours["token_logprobs"], abs=1e-3)
    assert [set(top) for top in mine["top_logprobs"]] == [set(top) for top in yours["top_logprobs"]]
    await probe.assert_at_rest()


async def test_a_list_of_prompts_gives_each_its_own_answer(probe: Probe, baseline: Baseline, model: Path) -> None:
    prompts = [token_ids(model, tokens, number=600 + tokens) for tokens in (45, 150)]
    body = completion([], prompt=prompts)
    ours, theirs = await ask(probe, "/v1/completions", body), await baseline.ask("/v1/completions", body)
    assert written(ours) == written(theirs)
    assert [choice["index"] for choice in ours["choices"]] == [0, 1]
    await probe.assert_at_rest()


async def test_one_token_asked_for_is_one_token(probe: Probe, model: Path) -> None:
    answer = await ask(probe, "/v1/completions", completion(token_ids(model, 40, number=700), max_tokens=1))
    assert answer["usage"]["completion_tokens"] == 1
    await probe.assert_at_rest()
