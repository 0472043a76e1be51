"""Tokenising once, exactly as the workers would, or not at all."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.errors import Misconfigured
from kvrelay.router import render
from kvrelay.router.prompts import plain_messages, whole_reason
from kvrelay.router.request import Kind, parse
from kvrelay.router.tokens import INLINE_CHARS, load_tokens
from kvrelay.types import Role
from tests.fleet.values import store
from tests.patience import until
from tests.router.cluster import Cluster
from tests.router.tiny_tokenizer import make_tokenizer

CHAT = [{"role": "user", "content": "Hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


@pytest.mark.slow
async def test_short_and_long_texts_get_the_same_ids_from_both_copies(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokens = load_tokens(model_folder)
    expected = AutoTokenizer.from_pretrained(str(model_folder))
    for text in ("the quick brown fox", "the quick brown fox. " * INLINE_CHARS):
        assert await tokens.encode(text, special=True) == expected.encode(text)
    tokens.close()


async def longest_turn_s(work: asyncio.Task[Any]) -> float:
    """Processor time of the longest step that ``work`` kept this loop busy with: other load on the machine is none."""
    longest_s, last_s, turns = 0.0, time.thread_time(), 0
    while not work.done():
        await asyncio.sleep(0.001)
        longest_s, last_s, turns = max(longest_s, time.thread_time() - last_s), time.thread_time(), turns + 1
    assert turns > 3, "others had their turns meanwhile"
    return longest_s


async def test_a_long_text_does_not_hold_the_loop_up(model_folder: Path) -> None:
    tokens = load_tokens(model_folder)
    encoding = asyncio.create_task(tokens.encode("the quick brown fox " * 50_000, special=True))
    assert await longest_turn_s(encoding) < 0.25
    assert len(encoding.result()) > 50_000
    tokens.close()


@pytest.mark.slow
async def test_many_short_texts_and_many_short_messages_do_not_hold_the_loop_up(model_folder: Path) -> None:
    tokens = load_tokens(model_folder)
    text = "the quick brown fox " * 395
    expected = await tokens.encode(text, special=True)
    for work in (
        tokens.encode_all([text] * 400, special=True),
        tokens.encode_chat([{"role": "user", "content": ""}] * 50_000),
    ):
        encoding: asyncio.Task[Any] = asyncio.create_task(work)
        assert await longest_turn_s(encoding) < 0.25
        assert encoding.result()[0] in (expected, *range(1000))
    tokens.close()


@pytest.mark.slow
def test_the_tokenizer_needs_neither_torch_nor_the_library_that_imports_it(model_folder: Path) -> None:
    code = (
        "import pathlib, asyncio, sys; from kvrelay.router.tokens import load_tokens; import kvrelay.router.runner\n"
        f"tokens = load_tokens(pathlib.Path({str(model_folder)!r}))\n"
        "print(asyncio.run(tokens.encode_chat([{'role': 'user', 'content': 'Hello'}])))\n"
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    expected = asyncio.run(load_tokens(model_folder).encode_chat(CHAT))
    assert done.stdout.splitlines() == [str(expected), "set()"]


@pytest.mark.slow
def test_files_of_another_kind_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(str(make_tokenizer(tmp_path)))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_given, **_more: converted)
    (tmp_path / "tokenizer.json").unlink()
    assert asyncio.run(load_tokens(tmp_path).encode("Hello", special=True)) == converted.encode("Hello")


def test_a_missing_model_folder_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="kvrelay model fetch"):
        load_tokens(tmp_path / "gone")


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no tokenizer"):
        load_tokens(tmp_path)


@pytest.mark.parametrize(
    "unusual",
    [
        {"tools": []},
        {"documents": [{"text": "x"}]},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"a": 1}},
        {"truncate_prompt_tokens": 5},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"reasoning_effort": "low"},
        {"response_format": {"type": "json_object"}},
        {"echo": True},
        {"never_heard_of": 1},
        {"messages": PARTS},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "developer", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": "n"}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nx"}]},
        {"messages": ["x"]},
    ],
)
def test_anything_unusual_about_a_chat_is_for_a_worker_to_render(unusual: dict[str, Any]) -> None:
    assert plain_messages({"model": "m", "messages": CHAT} | unusual) is None


def test_a_plain_chat_is_rendered_here() -> None:
    body = {"model": "m", "messages": CHAT, "temperature": 0, "stop": ["x"], "tools": None, "max_completion_tokens": 3}
    assert plain_messages(body) == CHAT


@pytest.mark.parametrize(("prompt", "reason"), [('"x"', None), ("[]", "empty_prompt"), ('[""]', "empty_prompt")])
def test_an_empty_prompt_stays_whole(prompt: str, reason: str | None) -> None:
    assert whole_reason(parse(Kind.COMPLETION, b'{"prompt":%s}' % prompt.encode())) == reason


async def test_a_worker_renders_what_is_unusual(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    before = len(prefill.calls) + len(decode.calls)
    status, _, _ = await cluster.post("/v1/chat/completions", {"model": "tiny", "messages": PARTS})
    assert status == 200
    ids = await cluster.tokens.encode_chat(CHAT)
    assert prefill.bodies()[0]["prompt"] == ids
    assert decode.bodies("/v1/chat/completions")[0]["kv_transfer_params"]["prompt_token_ids"] == ids
    assert len(prefill.calls) + len(decode.calls) == before + 3


async def test_a_plain_chat_asks_no_worker_to_render(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    before = len(prefill.calls) + len(decode.calls)
    await cluster.post("/v1/chat/completions", {"model": "tiny", "messages": CHAT})
    assert len(prefill.calls) + len(decode.calls) == before + 2


async def test_once_a_worker_renders_otherwise_workers_render_for_good(cluster: Cluster) -> None:
    await cluster.join(store())
    prefill = await cluster.add("p1", Role.PREFILL, render_shift=1)
    decode = await cluster.add("d1", Role.DECODE, checked=False)
    await cluster.complete()
    await cluster.post("/v1/chat/completions", {"model": "tiny", "messages": CHAT})
    for path in ("/v1/completions/render", "/v1/chat/completions/render"):
        assert len(prefill.bodies(path) + decode.bodies(path)) == 1 + 1


async def test_texts_stay_whole_where_no_worker_renders_and_token_ids_are_split(cluster: Cluster) -> None:
    await cluster.join(store())
    prefill = await cluster.add("p1", Role.PREFILL, renders=False)
    decode = await cluster.add("d1", Role.DECODE, renders=False)
    await cluster.complete()
    await cluster.post("/v1/chat/completions", {"model": "tiny", "messages": CHAT})
    assert (prefill.bodies(), decode.bodies()) == ([], [{"model": "tiny", "prompt": "Hello, you"}])
    assert decode.bodies("/v1/chat/completions") == [{"model": "tiny", "messages": CHAT}]
    assert await cluster.metric('kvrelay_local_requests_total{reason="no_render"}') == 2
    await cluster.complete(prompt=[5, 6, 7])
    assert [body["prompt"] for body in prefill.bodies()] == [[5, 6, 7]]


async def test_trust_in_one_model_is_none_in_another(cluster: Cluster) -> None:
    await cluster.split()
    await cluster.add("p2", Role.PREFILL, model="other", render_shift=1)
    decode = await cluster.add("d2", Role.DECODE, model="other", render_shift=1, checked=False)
    await cluster.complete(model="other")
    await cluster.post("/v1/chat/completions", {"model": "other", "messages": CHAT})
    ids = [token + 1 for token in await cluster.tokens.encode("Hello, you", special=True)]
    assert decode.bodies()[0]["prompt"] == ids
    params = decode.bodies("/v1/chat/completions")[0]["kv_transfer_params"]
    assert params["prompt_token_ids"] == [token + 1 for token in await cluster.tokens.encode_chat(CHAT)]
    before = len(cluster.workers["p1"].calls) + len(cluster.workers["d1"].calls)
    await cluster.complete()
    assert len(cluster.workers["p1"].calls) + len(cluster.workers["d1"].calls) == before + 2


@pytest.mark.parametrize("status", [401, 500])
async def test_a_worker_that_cannot_render_yet_is_asked_again_and_nothing_is_used_meanwhile(
    cluster: Cluster, status: int
) -> None:
    await cluster.join(store())
    prefill = await cluster.add("p1", Role.PREFILL, render_status=status, checked=False)
    decode = await cluster.add("d1", Role.DECODE, render_status=status, checked=False)
    await cluster.complete()
    assert (prefill.bodies(), decode.bodies()) == ([], [{"model": "tiny", "prompt": "Hello, you"}])
    prefill.calls.clear()
    prefill.render_status = 0
    await until(lambda: len(prefill.calls) == 5)
    decode.calls.clear()
    await cluster.complete()
    assert decode.bodies()[0]["prompt"] == await cluster.tokens.encode("Hello, you", special=True)


async def test_a_worker_that_hangs_while_it_renders_is_not_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "RENDER_S", 0.2)
    prefill, decode = await cluster.split()
    body = {"model": "tiny", "messages": PARTS}
    prefill.hold_render.clear()
    for _ in range(2):
        assert (await cluster.post("/v1/chat/completions", body))[0] == 200
    assert len(decode.bodies("/v1/chat/completions")[1]["kv_transfer_params"]["prompt_token_ids"]) > 0
    decode.hold_render.clear()
    assert (await cluster.post("/v1/chat/completions", body))[0] == 200
    assert decode.bodies("/v1/chat/completions")[2] == body
    for fake in (prefill, decode):
        fake.hold_render.set()


async def test_workers_take_turns_to_render(cluster: Cluster) -> None:
    fakes = await cluster.split()
    before = [len(fake.bodies("/v1/chat/completions/render")) for fake in fakes]
    for _ in range(4):
        await cluster.post("/v1/chat/completions", {"model": "tiny", "messages": PARTS})
    after = [len(fake.bodies("/v1/chat/completions/render")) for fake in fakes]
    assert after == [count + 2 for count in before]


@pytest.mark.parametrize("prompt", ["Hello", [5, 6]])
async def test_too_many_prompts_are_not_even_tokenised(
    cluster: Cluster, prompt: str | list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decode = await cluster.split()
    asked: list[object] = []
    monkeypatch.setattr(type(cluster.tokens), "encode_all", lambda *given, **_: asked.append(given))
    body = {"model": "tiny", "prompt": [prompt] * 65}
    assert (await cluster.post("/v1/completions", body))[0] == 200
    assert (decode.bodies(), asked) == ([body], [])
    assert await cluster.metric('kvrelay_local_requests_total{reason="many_prompts"}') == 1


async def test_what_a_worker_refuses_to_render_is_the_clients_400(cluster: Cluster) -> None:
    await cluster.split()
    body = {"model": "tiny", "messages": [{"content": "no role"}]}
    status, answer, _ = await cluster.post("/v1/chat/completions", body)
    assert (status, answer["error"]["message"]) == (400, "role is missing")
