"""What a client may do wrong, may not do, and may stop doing."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvrelay.config import RouterConfig
from kvrelay.errors import Overloaded
from kvrelay.router import gateway, intake, outflow, relay
from kvrelay.router.answers import StreamedAnswer
from kvrelay.router.bodies import Bodies, Claim
from kvrelay.types import Role, Stage
from tests.fleet.values import store
from tests.patience import CANCELLED_S, LEEWAY, PATIENCE_S, until
from tests.router.cluster import Cluster

ROUTES = ("/v1/completions", "/v1/chat/completions")
JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "Hello"}]


def _deep(key: str, levels: int) -> bytes:
    return b'{"model":"tiny","prompt":"x","messages":[],"%s":%s1%s}' % (key.encode(), b"[" * levels, b"]" * levels)


WRONG = [
    (ROUTES, b"", "empty"),
    (ROUTES, b"   ", "empty"),
    (ROUTES, b"{", "valid JSON"),
    (ROUTES, b"\xff", "valid JSON"),
    (ROUTES, b"[" * 100_000, "JSON"),
    (ROUTES, b"[]", "JSON object"),
    (ROUTES, b"null", "JSON object"),
    (ROUTES, b'{"messages":[],"model":3}', "model must be a string"),
    (ROUTES, b'{"messages":[],"stream":"yes"}', "stream must be true or false"),
    (ROUTES, b'{"messages":[],"n":0}', "n must be between"),
    (ROUTES, b'{"messages":[],"n":true}', "n must be an integer"),
    (ROUTES, b'{"messages":[],"max_tokens":"9"}', "max_tokens must be an integer"),
    (ROUTES, _deep("extra_body", 100), "nested more than 100"),
    (ROUTES, _deep("messages", 400), "nested more than 100"),
    (ROUTES, _deep("metadata", 900), "nested"),
    (ROUTES[:1], b'{"model":"tiny"}', "prompt must be a string"),
    (ROUTES[:1], b'{"prompt":5}', "prompt must be a string"),
    (ROUTES[:1], b'{"prompt":[1,"a"]}', "prompt must be a string"),
    (ROUTES[:1], b'{"prompt":[true]}', "prompt must be a string"),
    (ROUTES[:1], b'{"prompt":[[1],[]]}', "prompt must be a string"),
    (ROUTES[:1], b'{"prompt":[-1]}', "token ids in prompt"),
    (ROUTES[:1], b'{"prompt":[4294967296]}', "token ids in prompt"),
    (ROUTES[1:], b'{"model":"tiny"}', "messages must be a list"),
    (ROUTES[1:], b'{"messages":"hi"}', "messages must be a list"),
    (ROUTES[1:], b'{"messages":[{"content":"no role"}]}', "role is missing"),
]


@pytest.mark.parametrize(
    ("route", "data", "says"), [(route, data, says) for routes, data, says in WRONG for route in routes]
)
async def test_wrong_bodies_are_400_and_say_what_is_wrong(cluster: Cluster, route: str, data: bytes, says: str) -> None:
    await cluster.split()
    async with cluster.http.post(route, data=data, headers=JSON) as response:
        answer = await response.json()
    assert response.status == 400, answer
    assert says in answer["error"]["message"]
    assert answer["error"]["code"] == 400
    assert response.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "sent",
    [
        "",
        "text/plain",
        "text/plain;charset=application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=+json",
        "application/jsonp",
        "json",
    ],
)
async def test_a_body_that_is_not_sent_as_json_is_a_415_that_names_content_type(
    cluster: Cluster, route: str, sent: str
) -> None:
    prefill, decode = await cluster.split()
    before = len(prefill.calls + decode.calls)
    body = b'{"model":"tiny","prompt":"Hello","messages":[]}'
    headers, without = ({"content-type": sent}, ()) if sent else ({}, ("content-type",))
    async with cluster.http.post(route, data=body, headers=headers, skip_auto_headers=without) as response:
        answer = await response.json()
    assert response.status == answer["error"]["code"] == 415
    assert "content-type: application/json" in answer["error"]["message"]
    assert len(prefill.calls + decode.calls) == before


@pytest.mark.parametrize("sent", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
async def test_every_way_to_say_json_is_taken(cluster: Cluster, sent: str) -> None:
    await cluster.split()
    body, headers = b'{"model":"tiny","prompt":"Hello"}', {"content-type": sent}
    async with cluster.http.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("route", ROUTES)
async def test_an_unknown_model_is_404_and_named(cluster: Cluster, route: str) -> None:
    await cluster.split()
    body = {"model": "gone", "prompt": "x", "messages": CHAT}
    status, answer, _ = await cluster.post(route, body)
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "'gone'" in answer["error"]["message"]
    assert "tiny" in answer["error"]["message"]


async def test_a_request_that_names_no_model_gets_the_only_one(cluster: Cluster) -> None:
    await cluster.split()
    status, _, _ = await cluster.post("/v1/completions", {"prompt": "Hello, you"})
    assert status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/inference/v1/generate", 404),
        ("POST", "/v1/completions/render", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/completions/../../reset_prefix_cache", 404),
        ("GET", "/kvrelay/requests/req-unknown", 404),
    ],
)
async def test_routes_that_are_not_served_do_not_exist(cluster: Cluster, method: str, path: str, status: int) -> None:
    prefill, decode = await cluster.split()
    async with cluster.http.request(method, path, json={}) as response:
        answer = await response.json()
    assert response.status == status
    assert answer["error"]["code"] == status
    assert response.headers["x-request-id"]
    assert [path for path, _ in prefill.calls + decode.calls if "render" not in path] == []


async def test_the_models_are_those_of_the_workers(cluster: Cluster) -> None:
    await cluster.split()
    async with cluster.http.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    async with cluster.http.get("/v1/models/tiny") as response:
        assert await response.json() == model
    async with cluster.http.get("/v1/models/some/other") as response:
        assert response.status == 404
        assert "'some/other' does not exist; this router serves tiny" in (await response.json())["error"]["message"]


async def test_a_body_over_the_limit_is_a_json_413(model_folder: Path) -> None:
    async with Cluster(model_folder, RouterConfig(port=0, control_port=0, max_body_bytes=1000)) as cluster:
        await cluster.split()
        await cluster.complete(user="u" * 900)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        for data in (b" " * 1001, b" " * 5_000_000, pieces()):
            async with cluster.http.post("/v1/completions", data=data, headers=JSON) as response:
                assert response.status == 413
                assert "1000 bytes" in (await response.json())["error"]["message"]


async def test_a_small_body_that_unpacks_to_a_large_one_is_a_413(model_folder: Path) -> None:
    async with Cluster(model_folder, RouterConfig(port=0, control_port=0, max_body_bytes=100_000)) as cluster:
        await cluster.split()
        headers = {**JSON, "content-encoding": "gzip"}
        for size, status in ((50_000, 200), (50_000_000, 413)):
            body = gzip.compress(b'{"model":"tiny","prompt":"Hello","user":"%s"}' % (b"u" * size))
            async with cluster.http.post("/v1/completions", data=body, headers=headers) as response:
                assert response.status == status
        for junk in (b"no gzip at all", body[:20]):
            async with cluster.http.post("/v1/completions", data=junk, headers=headers) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"]


@pytest.mark.parametrize("kept_bytes", [20, 60, -12])
async def test_a_packed_body_whose_end_is_missing_is_a_400_that_says_so(cluster: Cluster, kept_bytes: int) -> None:
    await cluster.split()
    text = b'{"model":"tiny","prompt":"Hello","user":"%s"}' % os.urandom(64).hex().encode()
    packed = gzip.compress(text)[:kept_bytes]
    headers = {**JSON, "content-encoding": "gzip"}
    async with cluster.http.post("/v1/completions", data=packed, headers=headers) as response:
        assert response.status == 400
        assert "cut off" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("limit", ["BODY_S", "GRACE_S"])
async def test_a_body_that_never_ends_or_comes_slowly_is_a_408(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    await cluster.split()
    monkeypatch.setattr(intake, limit, 0.2)
    over = asyncio.Event()

    async def trickle() -> AsyncIterator[bytes]:
        yield b"{"
        await over.wait()

    async with asyncio.timeout(min(PATIENCE_S, intake.BODY_S + 5)):
        async with cluster.http.post("/v1/completions", data=trickle(), headers=JSON) as response:
            assert response.status == 408
            assert "send it faster" in (await response.json())["error"]["message"]
    over.set()


async def test_a_body_that_keeps_its_pace_may_take_longer_than_the_grace(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.split()
    monkeypatch.setattr(intake, "GRACE_S", 0.2)
    monkeypatch.setattr(intake, "MIN_BYTES_PER_S", 10)

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model":"tiny","user":"%s",' % (b"u" * 1000)
        await asyncio.sleep(0.4)
        yield b'"prompt":"x"}'

    assert await _status(cluster, pieces()) == 200


async def test_requests_that_are_still_being_read_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.split()
    monkeypatch.setattr(gateway, "MAX_READING", 0)
    status, _, headers = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert (status, headers["retry-after"]) == (503, "1")
    monkeypatch.setattr(gateway, "MAX_READING", 1)
    for _ in range(3):
        await cluster.complete()


async def test_bodies_that_the_router_holds_are_bounded(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_HELD_BYTES", 10_000)
    async with Cluster(model_folder) as cluster:
        prefill, _ = await cluster.split()
        prefill.hold.clear()
        long = asyncio.create_task(cluster.complete(user="u" * 20_000))
        await until(lambda: prefill.in_flight == 1)
        status, answer, headers = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert "held already" in answer["error"]["message"]
        prefill.hold.set()
        await long
        both = [cluster.complete(user="u" * 4_000) for _ in range(2)]
        await asyncio.gather(*both)
        await cluster.at_rest()


@pytest.mark.parametrize("announced", [True, False])
async def test_clients_that_begin_bodies_and_send_no_more_keep_nobody_out(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(gateway, "MAX_HELD_BYTES", 1 << 20)
    monkeypatch.setattr(gateway, "MAX_READING", 5)
    over, begun = asyncio.Event(), asyncio.Semaphore(0)
    read = intake.Intake.read

    async def seen(self: intake.Intake, http: web.Request, claim: Claim) -> bytes:
        begun.release()
        return await read(self, http, claim)

    monkeypatch.setattr(intake.Intake, "read", seen)

    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await over.wait()

    headers = JSON | ({"content-length": str(20 << 20)} if announced else {})
    async with Cluster(model_folder) as cluster:
        await cluster.split()
        slow = [asyncio.create_task(_status(cluster, stuck(), headers)) for _ in range(40)]
        async with asyncio.timeout(PATIENCE_S):
            for _ in slow:
                await begun.acquire()
        assert await _status(cluster, b'{"prompt":"x"}') == 200
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await cluster.at_rest()


def test_a_body_takes_room_as_it_arrives_and_gives_all_back() -> None:
    bodies = Bodies(100)
    with bodies.claim() as first, bodies.claim() as second:
        for size in (10, 60):
            first.grow(size)
        second.grow(40)
        with pytest.raises(Overloaded):
            second.grow(41)
        assert bodies.held_bytes == 100
    assert bodies.held_bytes == 0
    with bodies.claim() as alone:
        alone.grow(1000)
        assert bodies.held_bytes == 1000
    assert bodies.held_bytes == 0


async def _status(cluster: Cluster, data: bytes | AsyncIterator[bytes], headers: dict[str, str] | None = None) -> int:
    async with cluster.http.post("/v1/completions", data=data, headers=headers or JSON) as response:
        await response.read()
        return response.status


FOREIGN = {"kvrelay": {"type": "PrefillLeg", "transfer": "t", "push_to": "10.0.0.1:1"}, "prompt_token_ids": [1]}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
@pytest.mark.parametrize("value", [{}, None, "x", 7, [], FOREIGN, {"do_remote_prefill": True}])
async def test_transfer_fields_and_salts_of_clients_are_stripped_wherever_they_hide(
    cluster: Cluster, route: str, role: Role, value: object
) -> None:
    await cluster.join(store())
    if role is Role.DECODE:
        await cluster.add("p1", Role.PREFILL)
    decode = await cluster.add("d1", role)
    smuggled = {"kv_transfer_params": value, "cache_salt": "mine", "ec_transfer_params": value, "kvrelay": value}
    smuggled["kv_cache_report_mode"] = "full"
    body = {"model": "tiny", "prompt": "Hello, you", "messages": CHAT} | smuggled
    smuggled["priority"] = -9
    body |= smuggled
    body["extra_body"] = {"deep": [dict(smuggled)], "prompt": dict(smuggled), **smuggled}
    hidden = {"metadata": dict(smuggled), "documents": [dict(smuggled)]}
    body["vllm_xargs"] = {"kvrelay_replay": [1], "kv_transfer_params": "x", "harmless": 1, **hidden}
    status, answer, _ = await cluster.post(route, body)
    assert status == 200, answer
    (seen,) = decode.bodies(route)
    params = seen.pop("kv_transfer_params", {"kvrelay": {"type": "DecodeLeg"}})
    assert params["kvrelay"]["type"] == "DecodeLeg"
    assert params.get("prompt_token_ids") != [1]
    assert seen.pop("extra_body") == {"deep": [{}], "prompt": {}}
    assert seen.pop("vllm_xargs") == {"harmless": 1, "metadata": {}, "documents": [{}]}
    assert not seen.keys() & smuggled.keys()


async def test_a_tool_may_have_a_parameter_called_cache_salt(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"cache_salt": {}}}}}]
    await cluster.post(
        "/v1/chat/completions", {"model": "tiny", "messages": CHAT, "tools": tools, "tool_choice": "none"}
    )
    assert decode.bodies("/v1/chat/completions")[0]["tools"] == tools


@pytest.mark.parametrize("choice", [{}, {"tool_choice": None}, {"tool_choice": "auto"}])
async def test_tools_that_the_model_may_choose_are_the_workers_to_judge(
    cluster: Cluster, choice: dict[str, object]
) -> None:
    _, decode = await cluster.split()
    asked = {"tools": [{"type": "function", "function": {"name": "f"}}]} | choice
    status, _, _ = await cluster.post("/v1/chat/completions", {"model": "tiny", "messages": CHAT} | asked)
    (body,) = decode.bodies("/v1/chat/completions")
    assert status == 200
    assert {key: body[key] for key in body.keys() & {"tools", "tool_choice"}} == asked


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/responses"])
async def test_an_unknown_route_is_told_which_ones_there_are(cluster: Cluster, route: str) -> None:
    status, answer, _ = await cluster.post(route, {"model": "tiny"})
    assert status == 404
    assert f"POST {route} is not served here" in answer["error"]["message"]
    for served in ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /kvrelay/requests/{id}"):
        assert served in answer["error"]["message"]
    assert "HEAD" not in answer["error"]["message"]


async def test_the_prompt_of_a_refused_request_is_not_counted_as_read(cluster: Cluster) -> None:
    prefill, _ = await cluster.split()
    await cluster.complete()
    read = await cluster.metric("kvrelay_prompt_tokens_total")
    prefill.refuse = 400
    status, _, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "Hello, you"})
    assert status == 400
    assert await cluster.metric("kvrelay_prompt_tokens_total") == read > 0


async def test_only_holders_of_a_key_get_in_and_each_tenant_has_its_salt(model_folder: Path) -> None:
    config = RouterConfig(port=0, control_port=0, api_keys=("acme:k1", "acme:k2", "zoo:k3", "bare"))
    async with Cluster(model_folder, config) as cluster:
        prefill, decode = await cluster.split()
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic k1"}, {"authorization": "k1"}):
            for path in (*ROUTES, "/kvrelay/requests/x"):
                method = "GET" if path.startswith("/kvrelay") else "POST"
                async with cluster.http.request(method, path, headers=headers, json={}) as response:
                    assert response.status == 401
                    assert "Bearer" in (await response.json())["error"]["message"]
        for key in ("k1", "k2", "k3", "bare"):
            body = {"model": "tiny", "prompt": "Hello, you", "cache_salt": "stolen"}
            status, _, replied = await cluster.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
            assert status == 200
        salts = [body["cache_salt"] for body in prefill.bodies()]
        assert salts == [body["cache_salt"] for body in decode.bodies()]
        assert salts[0] == salts[1]
        assert len(set(salts)) == 3
        assert all(len(salt) == 64 and salt.isalnum() for salt in salts)
        for key, status in (("bare", 200), ("k1", 404)):
            path = f"/kvrelay/requests/{replied['x-request-id']}"
            async with cluster.http.get(path, headers={"authorization": f"Bearer {key}"}) as response:
                assert response.status == status
        await cluster.at_rest()


async def test_what_an_engine_tells_of_the_hand_off_reaches_no_client(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.transfer = {"remote_host": "10.0.0.1", "kvrelay": {"type": "Nonsense"}}
    decode.words = ['"kv_transfer_params": {', " said"]
    status, answer, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "Hello, you"})
    assert (status, answer["kv_transfer_params"]) == (200, None)
    assert answer["choices"][0]["text"] == '"kv_transfer_params": { said', "what the model says is the client's"


async def test_a_timeline_keeps_why_a_worker_refused(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.refuse, decode.refusal = 400, b'{"error":{"message":"it is over the context length","code":400}}'
    body = {"model": "tiny", "prompt": "x" * 100_000}
    status, _, headers = await cluster.post("/v1/completions", body)
    async with cluster.http.get(f"/kvrelay/requests/{headers['x-request-id']}") as response:
        timeline = await response.json()
    assert (status, timeline["status"], timeline["local_reason"]) == (400, 400, "over_length")
    assert timeline["failure"] == "it is over the context length"


async def test_the_first_chunk_is_forwarded_before_the_second_is_made(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.hold_words.clear()
    async with cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        first = await asyncio.wait_for(response.content.readany(), PATIENCE_S)
        assert first.count(b"\n\n") == 1
        decode.hold_words.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", ["prefill", "overlap", "decode"])
async def test_a_client_that_goes_away_cancels_both_legs(cluster: Cluster, point: str, stream: bool) -> None:
    prefill, decode = await cluster.split()
    prefill.hold.clear()
    decode.hold.clear()
    if point == "overlap":
        prefill.on_prefill = cluster.says(Stage.LAST_CHUNK)
    if point == "decode":
        prefill.hold.set()
    body = {"model": "tiny", "prompt": "Hello, you", "stream": stream}
    request = asyncio.create_task(cluster.post("/v1/completions", body))
    busy = {"prefill": (1, 0), "overlap": (1, 1), "decode": (0, 1)}[point]
    await until(lambda: (prefill.in_flight, decode.in_flight) == busy)
    request.cancel()
    await until(lambda: (prefill.aborted, decode.aborted) == busy, within_s=LEEWAY * CANCELLED_S)
    await cluster.at_rest()
    assert await cluster.metric('kvrelay_requests_total{path="remote_prefill",status="499"}') == 1


async def test_a_client_that_goes_away_in_mid_stream_cancels_d(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.hold_words.clear()
    async with cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}) as response:
        await response.content.readany()
        response.close()
    await until(lambda: decode.aborted == 1, within_s=LEEWAY * CANCELLED_S)
    await cluster.at_rest()
    assert await cluster.metric('kvrelay_requests_total{path="remote_prefill",status="499"}') == 1


async def test_a_client_that_is_gone_when_it_is_written_to_is_cancelled_without_a_line_in_the_log(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.split()
    pass_on = outflow._pass_on

    async def gone(http: web.Request, stream: StreamedAnswer, response: outflow.EventStream) -> None:
        assert http.transport is not None
        http.transport.close()
        await pass_on(http, stream, response)

    monkeypatch.setattr(outflow, "_pass_on", gone)
    with pytest.raises(aiohttp.ClientError):
        await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True})
    await cluster.at_rest()
    assert await cluster.metric('kvrelay_requests_total{path="remote_prefill",status="499"}') == 1
    assert "Traceback" not in caplog.text


async def test_a_client_that_goes_away_with_the_last_event_was_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "DRAIN_S", 2 * PATIENCE_S)
    _, decode = await cluster.split()
    decode.hold_end.clear()
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with cluster.http.post("/v1/completions", json=body, headers={"connection": "close"}) as response:
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
    await cluster.at_rest()
    assert await cluster.metric('kvrelay_requests_total{path="remote_prefill",status="200"}') == 1
    decode.hold_end.set()


async def test_clients_that_go_away_in_mid_stream_open_no_breaker(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.hold_words.clear()
    asked = {"model": "tiny", "prompt": "x", "stream": True}
    responses = [await cluster.http.post("/v1/completions", json=asked) for _ in range(8)]
    for response in responses:
        await response.content.readany()
    for response in responses:
        response.close()
    await until(lambda: decode.aborted == 8, within_s=LEEWAY * CANCELLED_S)
    await cluster.at_rest()
    assert await cluster.metric("kvrelay_breakers_opened_total") == 0


async def test_a_client_that_reads_nothing_is_hung_up_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outflow, "STALL_S", 0.3)
    _, decode = await cluster.split()
    decode.words = ["x" * (1 << 20)] * 64
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: decode.aborted == 1, within_s=LEEWAY * CANCELLED_S)
    await cluster.at_rest()
    assert await cluster.metric('kvrelay_requests_total{path="remote_prefill",status="499"}') == 1
    writer.transport.abort()
    assert reader.exception() is None


async def test_a_client_that_knows_no_chunks_gets_the_events_alone_until_the_connection_ends(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    said = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    events = said.split(b"\n\n")
    assert len(events) > len(decode.words)
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert said.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_after_100_requests_of_which_a_third_were_cancelled_nothing_is_reserved(cluster: Cluster) -> None:
    prefill, _ = await cluster.split()
    await cluster.add("p2", Role.PREFILL)
    second = await cluster.add("d2", Role.DECODE)
    prefill.on_prefill = cluster.says(Stage.STARTED, Stage.LAST_CHUNK)
    second.die_after = 1
    chance = random.Random(7)

    async def one(number: int) -> None:
        body = {"model": "tiny", "prompt": [f"request {number}"] * chance.randint(1, 3), "stream": number % 2 == 0}
        async with cluster.http.post("/v1/completions", json=body) as response:
            await response.read()

    tasks = [asyncio.create_task(one(number)) for number in range(100)]
    for task in chance.sample(tasks, 30):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.at_rest()
    assert await cluster.metric("kvrelay_in_flight") == 0


async def test_what_members_count_shows_in_the_metrics(cluster: Cluster) -> None:
    await cluster.split()
    assert await cluster.metric('kvrelay_worker_ready{role="prefill",worker="p1"}') == 1
    assert await cluster.metric('kvrelay_store_ready{store="s1"}') == 1
    await until(lambda: all(member.counts for member in cluster.router.brain.fleet.stores))
    assert await cluster.metric('kvrelay_store_count{count="pages_used",store="s1"}') == 3
