"""A request over its two legs, as workers and client see it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.config import RouterConfig
from kvrelay.identity import near_salt
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg, read_handoff
from kvrelay.types import Role, Stage
from tests.fleet.values import store
from tests.patience import until
from tests.router.cluster import Cluster


def decode_leg(body: dict[str, Any]) -> DecodeLeg:
    leg = read_handoff(body["kv_transfer_params"])
    assert isinstance(leg, DecodeLeg)
    return leg


def prefill_leg(body: dict[str, Any]) -> PrefillLeg:
    leg = read_handoff(body["kv_transfer_params"])
    assert isinstance(leg, PrefillLeg)
    return leg


async def test_p_gets_token_ids_and_nothing_of_the_clients_body(cluster: Cluster) -> None:
    prefill, _ = await cluster.split()
    await cluster.complete(temperature=0.3, n=2, min_tokens=5, max_tokens=9, stop=["x"], logprobs=2)
    ids = await cluster.tokens.encode("Hello, you", special=True)
    (body,) = prefill.bodies()
    assert body.pop("kv_transfer_params")["kvrelay"]["push_to"] is None
    assert body == {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0, "stream": False}


async def test_a_d_that_may_convert_keeps_what_it_loads_apart_in_its_own_cache(model_folder: Path) -> None:
    config = RouterConfig(port=0, control_port=0, convert_kv_dtype=True)
    async with Cluster(model_folder, config) as cluster:
        prefill, decode = await cluster.split(dtype="float32")
        await cluster.complete()
        assert "cache_salt" not in prefill.bodies()[0]
        (body,) = decode.bodies()
        assert (body["cache_salt"], decode_leg(body).page_dtypes) == (near_salt(""), ["float32"])


async def test_d_gets_the_clients_body_with_ids_instead_of_text(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    await cluster.complete(temperature=0.3, n=2, min_tokens=5, max_tokens=9, seed=7)
    (body,) = decode.bodies()
    assert decode_leg(body).transfers == [prefill_leg(prefill.bodies()[0]).transfer]
    del body["kv_transfer_params"]
    ids = prefill.bodies()[0]["prompt"]
    asked = {"temperature": 0.3, "n": 2, "min_tokens": 5, "max_tokens": 9, "seed": 7}
    assert body == {"model": "tiny", "prompt": ids} | asked


async def test_a_chat_is_templated_once_and_d_gets_the_ids(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    messages = [{"role": "user", "content": "Hello"}]
    status, answer, _ = await cluster.post("/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two three")
    ids = await cluster.tokens.encode_chat(messages)
    assert prefill.bodies()[0]["prompt"] == ids
    (body,) = decode.bodies("/v1/chat/completions")
    assert body["kv_transfer_params"]["prompt_token_ids"] == ids
    assert body["messages"] == messages


async def test_d_is_asked_when_p_enters_its_last_chunk(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.hold.clear()
    prefill.on_prefill = cluster.says(Stage.STARTED, Stage.LAST_CHUNK)
    request = asyncio.create_task(cluster.complete())
    await until(lambda: len(decode.bodies()) == 1)
    assert prefill.in_flight == 1
    prefill.hold.set()
    await request


async def test_d_is_not_asked_while_p_computes_earlier_chunks(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.hold.clear()
    prefill.on_prefill = cluster.says(Stage.STARTED)
    request = asyncio.create_task(cluster.complete())
    await until(lambda: prefill.in_flight == 1)
    await asyncio.sleep(0.2)
    assert decode.bodies() == []
    prefill.hold.set()
    await request
    assert len(decode.bodies()) == 1


async def test_d_computes_the_prompt_when_the_transfer_failed(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.hold.clear()
    prefill.on_prefill = cluster.says(Stage.FAILED)
    request = asyncio.create_task(cluster.complete())
    await until(lambda: len(decode.bodies()) == 1)
    prefill.hold.set()
    await request


@pytest.mark.slow
async def test_d_computes_the_prompt_after_a_long_silence_of_p(model_folder: Path) -> None:
    config = RouterConfig(port=0, control_port=0, transfer_wait_s=0.3)
    async with Cluster(model_folder, config) as cluster:
        prefill, _ = await cluster.split()
        prefill.hold.clear()
        start = time.monotonic()
        answer = await cluster.complete()
        assert time.monotonic() - start >= 0.3
        assert answer["choices"][0]["text"] == "one two three"
        await cluster.at_rest()


async def test_p_pushes_to_ds_store_when_they_are_on_two_nodes(cluster: Cluster) -> None:
    await cluster.join(store("s1", "127.0.0.1:9001"))
    await cluster.join(store("s2", "127.0.0.1:9002"))
    prefill = await cluster.add("p1", Role.PREFILL, store_name="s1")
    await cluster.add("d1", Role.DECODE, store_name="s2")
    await cluster.complete()
    assert prefill_leg(prefill.bodies()[0]).push_to == "127.0.0.1:9002"


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_says_what_p_had_cached(cluster: Cluster, stream: bool) -> None:
    prefill, decode = await cluster.split()
    prefill.cached_tokens, decode.cached_tokens = 2, 999
    if stream:
        *_, usage, done = await cluster.stream(stream_options={"include_usage": True})
        assert done == b"data: [DONE]"
        answer = msgspec.json.decode(usage.removeprefix(b"data: "))
    else:
        answer = await cluster.complete()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_list_of_prompts_is_one_prefill_each_and_one_decode(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    await cluster.complete(prompt=["Hello, you", "the quick brown fox"])
    first, second = (prefill_leg(body).transfer for body in prefill.bodies())
    assert first != second
    (body,) = decode.bodies()
    assert sorted(decode_leg(body).transfers) == sorted([first, second])
    assert body["prompt"] == [leg["prompt"] for leg in prefill.bodies()]


async def test_lists_of_token_ids_keep_their_shape(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    await cluster.complete(prompt=[5, 6, 7])
    await cluster.complete(prompt=[[5, 6, 7], [8, 9]])
    await cluster.complete(prompt=[[5, 6, 7]])
    assert [body["prompt"] for body in decode.bodies()] == [[5, 6, 7], [[5, 6, 7], [8, 9]], [5, 6, 7]]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo_logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": "x" * 100_000}, "over_length"),
    ],
)
async def test_requests_that_gain_nothing_from_a_split_go_to_d_as_they_are(
    cluster: Cluster, asked: dict[str, Any], reason: str
) -> None:
    prefill, decode = await cluster.split()
    body = {"model": "tiny", "prompt": "Hello, you"} | asked
    assert (await cluster.post("/v1/completions", body))[0] == 200
    assert (prefill.bodies(), decode.bodies()) == ([], [body])
    assert await cluster.metric(f'kvrelay_local_requests_total{{reason="{reason}"}}') == 1


async def test_an_echoed_prompt_keeps_its_text(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    await cluster.complete(echo=True)
    assert len(prefill.bodies()) == 1
    assert decode.bodies()[0]["prompt"] == "Hello, you"


async def test_colocated_workers_get_the_clients_body_in_one_leg(cluster: Cluster) -> None:
    await cluster.join(store())
    first = await cluster.add("b1", Role.BOTH)
    second = await cluster.add("b2", Role.BOTH)
    for _ in range(2):
        await cluster.complete(temperature=0)
    body = {"model": "tiny", "prompt": "Hello, you", "temperature": 0}
    assert first.bodies() + second.bodies() == [body, body]


async def test_workers_with_unlike_fingerprints_are_never_paired(cluster: Cluster) -> None:
    await cluster.join(store())
    prefill = await cluster.add("p1", Role.PREFILL, weights="old")
    decode = await cluster.add("d1", Role.DECODE, weights="new")
    await cluster.complete()
    assert prefill.bodies() == []
    assert "kv_transfer_params" not in decode.bodies()[0]
    assert await cluster.metric('kvrelay_local_requests_total{reason="no_pair"}') == 1
    async with cluster.http.get("/health") as response:
        health = await response.json()
    assert (response.status, health["status"]) == (200, "degraded")
    assert health["unpaired"] == [{"prefill": "p1", "decode": "d1", "reason": "fingerprint.weights"}]


async def test_a_rolling_upgrade_pairs_new_with_new(cluster: Cluster) -> None:
    await cluster.join(store())
    old = await cluster.add("p1", Role.PREFILL, weights="old")
    new = await cluster.add("p2", Role.PREFILL, weights="new")
    await cluster.add("d1", Role.DECODE, weights="new")
    for _ in range(3):
        await cluster.complete()
    assert (len(old.bodies()), len(new.bodies())) == (0, 3)


async def test_the_timeline_tells_both_legs(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.cached_tokens = 1
    prefill.on_prefill = cluster.says(Stage.STARTED, Stage.LAST_CHUNK)
    prefill.hold.clear()
    asked = asyncio.create_task(cluster.post("/v1/completions", {"model": "tiny", "prompt": "Hello, you"}))
    await until(decode.bodies)  # the last chunk was heard of, and not overtaken by P's answer
    async with cluster.http.get("/kvrelay/requests") as response:
        (running,) = (await response.json())["requests"]
    assert (running["now"]["waits_for"], running["now"]["decode"]["worker"]) == ("decode", "d1")
    told = {"decode_turn": "come", "prefill_calls": 1, "streams": False, "journal_tokens": 0}
    assert {name: running["now"][name] for name in told} == told
    assert running["now"]["decode_calls"] <= 1
    assert "<" not in str(running), "nothing there is a Python object's picture of itself"
    async with cluster.http.get(f"/kvrelay/requests/{running['request_id']}") as response:
        assert (await response.json())["now"]["prefills"][0]["state"] == "last_chunk"
    prefill.hold.set()
    _, _, headers = await asked
    name = headers["x-request-id"]
    transfer = prefill_leg(prefill.bodies()[0]).transfer
    await cluster.members["s1"].event(transfer, Stage.ARRIVED, bytes=77, seconds=0.5)
    await cluster.members["s1"].event(transfer, Stage.LOADED, tokens=2)
    await until(lambda: "loaded" in cluster.router.brain.ledger.get(name).events)  # type: ignore[union-attr]
    async with cluster.http.get(f"/kvrelay/requests/{name}") as response:
        timeline = await response.json()
    assert timeline["path"] == "remote_prefill"
    assert "now" not in timeline, "it is over"
    (decision,) = timeline["decision"]
    assert (decision["about"], decision["prefill_worker"], decision["decode_worker"]) == ("request", "p1", "d1")
    assert decision["runners_up"] == []
    assert decision["ttft_s"] <= decision["total_s"] == pytest.approx(sum(decision["cost_s"].values()), abs=1e-5)
    assert (timeline["prefill_worker"], timeline["decode_worker"], timeline["status"]) == ("p1", "d1", 200)
    assert (timeline["cached_tokens"], timeline["output_tokens"]) == (1, 3)
    order = ["received", "tokenised", "routed", "prefill_sent", "prefill_started", "last_chunk"]
    assert list(timeline["events"])[:6] == order
    moved = timeline["transfer"]
    assert (moved["bytes"], moved["seconds"], moved["loaded_tokens"]) == (77, 0.5, 2)
    events = timeline["events"]
    assert moved["exposed_s"] == pytest.approx(events["loaded"] - events["prefill_finished"])
    assert moved["hidden_s"] == pytest.approx(events["prefill_finished"] - events["prefill_started"])


@pytest.mark.slow
async def test_a_body_of_20_mb_passes(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    await cluster.complete(user="u" * (20 << 20))
    assert len(decode.bodies()[0]["user"]) == 20 << 20
