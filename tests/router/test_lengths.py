"""Prompts and answers that are too long for some workers of their model, or for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import Role
from tests.fleet.values import store
from tests.patience import until
from tests.router.cluster import Cluster


@pytest.fixture
async def mixed(model_folder: Path) -> AsyncIterator[Cluster]:
    """A short and a long worker of each role."""
    async with Cluster(model_folder) as cluster:
        await cluster.join(store())
        for name, role, tokens in (
            ("p-short", Role.PREFILL, 512),
            ("p-long", Role.PREFILL, 2048),
            ("d-short", Role.DECODE, 512),
            ("d-long", Role.DECODE, 2048),
        ):
            fake = await cluster.add(name, role, max_model_len=tokens)
            fake.render_status = 400 if tokens == 512 else 0
        yield cluster


def asked(cluster: Cluster) -> set[str]:
    return {name for name, fake in cluster.workers.items() if fake.bodies() or fake.bodies("/v1/chat/completions")}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * 600},
        {"prompt": [5] * 100, "max_tokens": 600},
        {"messages": [{"role": "user", "content": "word " * 200}]},
        {"messages": [{"role": "user", "content": "word " * 200}], "tools": [{"type": "function"}]},
        {"prompt": "word " * 200, "suffix": "end"},
        {"prompt": "x" * 100_000},
    ],
    ids=["prompt", "answer", "chat", "rendered chat", "whole", "over all"],
)
async def test_workers_that_are_too_short_are_not_asked(mixed: Cluster, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    for _ in range(4):
        status, answer, _ = await mixed.post(path, {"model": "tiny", **body})
        assert status == 200, answer
    assert "d-long" in asked(mixed)
    assert asked(mixed) <= {"d-long", "p-long"}
    await mixed.at_rest()


async def test_a_chat_that_demands_no_length_is_answered_by_short_workers_too(mixed: Cluster) -> None:
    for number in range(8):
        chat = {"model": "tiny", "messages": [{"role": "user", "content": f"Hello {number}"}]}
        assert (await mixed.post("/v1/chat/completions", chat))[0] == 200
    assert {"d-short", "d-long"} <= asked(mixed)


TOO_LONG = [
    (
        {"prompt": [5] * 2049},
        "This model's maximum context length is 2048 tokens. However, your prompt contains 2049 input tokens, which "
        "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        "(parameter=input_tokens, value=2049)",
        "input_tokens",
    ),
    (
        {"prompt": [5], "max_tokens": 2049},
        "max_tokens=2049 cannot be greater than max_model_len=2048. Please request fewer output tokens. "
        "(parameter=max_tokens, value=2049)",
        "max_tokens",
    ),
    (
        {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5000},
        "max_completion_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens. "
        "(parameter=max_completion_tokens, value=5000)",
        "max_completion_tokens",
    ),
]


@pytest.mark.parametrize(("body", "message", "param"), TOO_LONG, ids=["prompt", "answer", "chat"])
async def test_what_nobody_takes_is_refused_in_vllms_words_and_without_asking_anybody(
    mixed: Cluster, body: dict[str, Any], message: str, param: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer, _ = await mixed.post(path, {"model": "tiny", **body})
    assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, message, param)
    assert asked(mixed) == set()
    await mixed.at_rest()


@pytest.mark.parametrize("kind", ["prompt", "answer", "text", "chat"])
async def test_what_a_worker_takes_that_is_away_may_be_sent_again(mixed: Cluster, kind: str) -> None:
    await mixed.members["d-long"].send(mixed.members["d-long"].heartbeat(healthy=False))
    mixed.members["d-long"].silent = True
    await until(lambda: not mixed.is_ready("d-long"))
    text = "x" * (513 * mixed.tokens.max_chars_per_token)  # more than 512 tokens, whatever they are
    bodies: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": [5] * 600},
        "answer": {"prompt": [5], "max_tokens": 600},
        "text": {"prompt": text},
        "chat": {"messages": [{"role": "user", "content": text}]},
    }
    body = bodies[kind]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, _, headers = await mixed.post(path, {"model": "tiny", **body})
    assert (status, "retry-after" in headers) == (503, True)
    assert asked(mixed) == set()


async def test_short_chats_are_rendered_by_all_and_those_that_may_be_too_long_for_some_by_others(
    model_folder: Path,
) -> None:
    async with Cluster(model_folder) as cluster:
        await cluster.join(store())
        for name, tokens in (("long", 2048), ("s0", 512), ("s1", 512), ("s2", 512)):
            await cluster.add(name, Role.BOTH, max_model_len=tokens)
        for number in range(8):
            await cluster.post("/v1/chat/completions", rendered_chat(f"Hello {number}"))
        assert {name: renderings(cluster, name) for name in cluster.workers} == dict.fromkeys(cluster.workers, 2)
        for number in range(4):
            await cluster.post("/v1/chat/completions", rendered_chat(f"Hello {number} " + "word " * 200))
            await cluster.post("/v1/chat/completions", rendered_chat(f"Hello {number}", max_tokens=600))
        assert renderings(cluster, "long") == 10


def rendered_chat(content: str, **more: Any) -> dict[str, Any]:
    """A worker has to render it."""
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": messages, "tools": [{"type": "function"}], **more}


def renderings(cluster: Cluster, name: str) -> int:
    """Of such chats."""
    return sum("tools" in body for body in cluster.workers[name].bodies("/v1/chat/completions/render"))
