"""What a client sees when a worker refuses, dies or vanishes."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

import msgspec
import pytest

from kvrelay.config import RouterConfig
from kvrelay.feed import Feed
from kvrelay.policy.breaker import State
from kvrelay.protocol.feed import Heartbeat, RegisterStore, RegisterWorker
from kvrelay.router import prefills
from kvrelay.types import Role, Stage
from tests.fleet.values import store, worker
from tests.patience import CANCELLED_S, LEEWAY, PATIENCE_S, RECOVERED_S, until
from tests.router.cluster import KEY, Cluster
from tests.router.test_two_legs import decode_leg
from tests.sockets import sockets_to


async def test_ps_400_reaches_the_client_with_its_body_and_d_is_never_asked(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.refuse, prefill.refusal = 400, b'{"error":{"message":"maximum context length is 512","code":400}}'
    async with asyncio.timeout(LEEWAY * CANCELLED_S):
        status, answer, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": list(range(1, 400))})
    assert (status, answer["error"]["message"]) == (400, "maximum context length is 512")
    assert decode.bodies() == []


async def test_a_worker_with_another_key_is_not_the_clients_fault(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.refuse = 401
    status, _, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert status == 503


@pytest.mark.parametrize("fault", ["refuses", "resets"])
async def test_another_p_computes_the_prompt_when_one_fails(cluster: Cluster, fault: str) -> None:
    first, decode = await cluster.split()
    second = await cluster.add("p2", Role.PREFILL)
    first.refuse, first.reset = (500, False) if fault == "refuses" else (0, True)
    await cluster.complete()
    assert (len(first.bodies()), len(second.bodies()), len(decode.bodies())) == (1, 1, 1)
    (transfer,) = decode_leg(decode.bodies()[0]).transfers
    assert transfer.endswith("/0/1")


async def test_d_computes_the_prompt_when_every_p_fails(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.refuse, decode.cached_tokens = 503, 1
    answer = await cluster.complete()
    assert answer["choices"][0]["text"] == "one two three"
    assert decode_leg(decode.bodies()[0]).transfers == []
    # No P had a part in it: D's own count is the truth.
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_a_p_that_gives_up_half_way_counts_as_failed(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.refuse, prefill.refusal = 200, json.dumps({"choices": [{"finish_reason": "abort"}]}).encode()
    assert (await cluster.complete())["choices"][0]["text"] == "one two three"
    assert len(decode.bodies()) == 1


@pytest.mark.parametrize(("stream", "fault"), [(False, "refuses"), (False, "resets"), (True, "resets"), (True, "dies")])
async def test_another_d_answers_when_one_fails_before_its_first_byte(
    cluster: Cluster, fault: str, stream: bool
) -> None:
    _, first = await cluster.split()
    second = await cluster.add("d2", Role.DECODE)
    first.refuse, first.reset = 500 if fault == "refuses" else 0, fault == "resets"
    first.die_after = 0
    if stream:
        assert len(await cluster.stream()) == 4
    else:
        await cluster.complete()
    assert (len(first.bodies()), len(second.bodies())) == (1, 1)


async def test_a_request_whose_d_dies_waits_for_another_one_that_does_not_work_at_the_moment(cluster: Cluster) -> None:
    _, first = await cluster.split()
    second = await cluster.add("d2", Role.DECODE)
    first.reset, cluster.members["d2"].progress = True, 5
    brain = cluster.router.brain
    d2 = brain.fleet.workers.get("d2")
    assert d2 is not None
    await until(lambda: d2.progress == 5)
    brain.fleet.workers.stall("d2", time.monotonic())
    answer = asyncio.create_task(cluster.complete())
    await until(lambda: len(brain.recovery) == 1)
    cluster.members["d2"].works = True
    assert (await answer)["choices"][0]["text"] == "one two three"
    assert (len(first.bodies()), len(second.bodies())) == (1, 1)


async def test_a_second_d_on_another_node_is_not_told_of_transfers_that_went_elsewhere(cluster: Cluster) -> None:
    await cluster.join(store("s2", "127.0.0.1:9002"))
    _, first = await cluster.split()
    second = await cluster.add("d2", Role.DECODE, store_name="s2")
    first.reset = True
    await cluster.complete()
    assert len(decode_leg(first.bodies()[0]).transfers) == 1
    assert decode_leg(second.bodies()[0]).transfers == []


@pytest.mark.parametrize("stream", [False, True])
async def test_when_no_d_is_left_the_client_gets_a_503_and_never_an_empty_200(cluster: Cluster, stream: bool) -> None:
    _, decode = await cluster.split()
    decode.words, decode.reset = [], True
    asked = {"model": "tiny", "prompt": "Hello, you", "stream": stream}
    status, answer, headers = await cluster.post("/v1/completions", asked)
    assert (status, headers["retry-after"]) == (503, "1")
    assert "retry" in answer["error"]["message"]


async def test_a_stream_without_events_is_a_503(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.refuse, decode.refusal = 200, b""
    status, _, headers = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True})
    assert (status, headers["retry-after"]) == (503, "1")


async def test_a_stream_that_begins_with_an_error_is_no_200(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.error_after = 0
    status, _, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True})
    assert status == 503


async def test_ds_400_reaches_the_client_whole(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.refuse, decode.refusal = 400, b'{"error":{"message":"temperature must be positive","code":400}}'
    status, answer, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True})
    assert (status, answer["error"]["message"]) == (400, "temperature must be positive")


async def test_a_d_that_dies_in_mid_stream_ends_in_an_error_event_without_done(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.die_after = 2
    one, two, error = await cluster.stream()
    assert (b"one" in one, b"two" in two) == (True, True)
    detail = json.loads(error.removeprefix(b"data: "))["error"]
    assert detail["code"] == 502
    assert "send the request again" in detail["message"]


async def test_an_engine_that_dies_in_mid_stream_makes_no_false_done(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.error_after = 1
    one, error = await cluster.stream()
    assert b"one" in one
    assert b'"code":502' in error


@pytest.mark.slow
async def test_a_p_that_falls_silent_does_not_hold_the_request_up(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.hold.clear()
    request = asyncio.create_task(cluster.complete())
    await until(lambda: prefill.in_flight == 1)
    cluster.members["p1"].silent = True
    await asyncio.wait_for(request, LEEWAY * RECOVERED_S)
    assert len(decode.bodies()) == 1
    await until(lambda: prefill.aborted == 1, within_s=LEEWAY * CANCELLED_S)


async def test_a_d_that_says_goodbye_in_mid_stream_ends_the_stream_with_an_error(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.hold_words.clear()
    asked = {"model": "tiny", "prompt": "Hello, you", "stream": True}
    async with cluster.http.post("/v1/completions", json=asked) as response:
        one = await response.content.readuntil(b"\n\n")
        await cluster.members["d1"].leave()
        error = await asyncio.wait_for(response.content.read(), LEEWAY * RECOVERED_S)
    assert (b"one" in one, b'"code":502' in error) == (True, True)
    await until(lambda: decode.aborted == 1, within_s=LEEWAY * CANCELLED_S)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_d_that_hangs_for_several_leases_does_not_keep_its_client(model_folder: Path, stream: bool) -> None:
    async with Cluster(model_folder, dead_after_s=0.5) as cluster:
        _, decode = await cluster.split()
        (decode.hold_words if stream else decode.hold).clear()
        body = {"model": "tiny", "prompt": "Hello, you", "stream": stream}
        start = time.monotonic()
        request = asyncio.create_task(_read(cluster, body))
        await until(lambda: decode.in_flight == 1)
        cluster.members["d1"].silent = True
        status, answer = await asyncio.wait_for(request, LEEWAY * RECOVERED_S)
        assert time.monotonic() - start > 2 * 0.5
        assert status == (200 if stream else 503)
        assert b"again" in answer if stream else b"retry" in answer
        await until(lambda: decode.aborted == 1, within_s=LEEWAY * CANCELLED_S)
        await cluster.at_rest()


async def _read(cluster: Cluster, body: dict[str, object]) -> tuple[int, bytes]:
    async with cluster.http.post("/v1/completions", json=body) as response:
        return response.status, await response.read()


@pytest.mark.slow
async def test_a_request_that_reaches_a_hung_d_late_goes_to_another(model_folder: Path) -> None:
    async with Cluster(model_folder, dead_after_s=0.5) as cluster:
        prefill, first = await cluster.split()
        prefill.hold.clear()
        request = asyncio.create_task(cluster.complete())
        await until(lambda: prefill.in_flight == 1)
        first.hold.clear()
        cluster.members["d1"].silent = True
        second = await cluster.add("d2", Role.DECODE)
        workers = cluster.router.brain.fleet.workers
        await until(lambda: [info.name for info in workers.given_up(time.monotonic())] == ["d1"])
        prefill.hold.set()
        await asyncio.wait_for(request, LEEWAY * RECOVERED_S)
        assert (len(first.bodies()), len(second.bodies())) == (1, 1)
        await cluster.at_rest()


async def test_connections_to_workers_notice_a_machine_that_is_gone(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.hold.clear()
    request = asyncio.create_task(cluster.complete())
    await until(lambda: decode.in_flight == 1)
    port = int(decode.url.rsplit(":", 1)[1])
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)]
    assert {tuple(sock.getsockopt(*option) for option in options) for sock in sockets_to(port)} == {(1, 5)}
    decode.hold.set()
    await request


async def test_an_unexpected_failure_of_a_late_prefill_is_logged(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(answer: bytes) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(prefills, "prefill_cached_tokens", broken)
    prefill, decode = await cluster.split()
    prefill.on_prefill = cluster.says(Stage.STARTED, Stage.LAST_CHUNK)
    prefill.hold.clear()
    decode.hold.clear()
    request = asyncio.create_task(cluster.complete())
    await until(lambda: decode.in_flight == 1)
    prefill.hold.set()
    await until(lambda: "the prefill of prompt 0 of req-" in caplog.text)
    decode.hold.set()
    await request
    assert "RuntimeError: a bug" in caplog.text


async def test_a_ghost_does_not_take_a_live_workers_place(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    ghost = await cluster.add("ghost", Role.DECODE, model="ghosts")
    await cluster.dial(worker("d1", Role.DECODE, url=ghost.url, incarnation="i0"))
    await until(lambda: cluster.router.brain.fleet.workers.refused == 1)
    await cluster.complete()
    assert len(decode.bodies()) == 1
    assert await cluster.metric("kvrelay_registrations_refused_total") == 1
    assert await cluster.metric("kvrelay_links_crashed_total") == 0


async def test_a_store_with_the_name_of_one_that_lives_is_told_so_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.dial(store("s1"))
    second = RegisterStore(store=store("s1", incarnation="another"))
    beat = Heartbeat(name="s1", incarnation="another", healthy=True)
    feed = Feed([cluster.control], KEY, sender="s1", registration=second, heartbeat=lambda: beat, heartbeat_s=1.0)
    running = asyncio.create_task(feed.run())
    await until(lambda: cluster.router.brain.fleet.stores.refused >= 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (said,) = [record.message for record in caplog.records if "refused by the router" in record.message]
    assert "s1 is registered and lives; stop it, or start this one under another name" in said


async def test_a_worker_that_was_killed_and_started_again_gets_its_name_back_at_once(model_folder: Path) -> None:
    async with Cluster(model_folder, dead_after_s=10 * PATIENCE_S) as cluster:
        _, decode = await cluster.split()
        cluster.members["d1"].silent = True
        cluster.members["d1"].link.close()
        beat = Heartbeat(name="d1", incarnation="i2", healthy=True)
        feed = Feed(
            [cluster.control],
            KEY,
            sender="d1",
            registration=RegisterWorker(worker=worker("d1", Role.DECODE, url=decode.url, incarnation="i2")),
            heartbeat=lambda: beat,
            heartbeat_s=0.1,
        )
        running = asyncio.create_task(feed.run())
        workers = cluster.router.brain.fleet.workers
        await until(lambda: workers.usable(time.monotonic())[0].incarnation == "i2", within_s=LEEWAY * RECOVERED_S)
        running.cancel()
        await cluster.at_rest()


async def test_a_new_incarnation_answers_what_ran_on_the_old_one(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    decode.hold.clear()
    request = asyncio.create_task(cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"}))
    await until(lambda: decode.in_flight == 1)
    cluster.members["d1"].silent = True
    cluster.members["d1"].link.close()
    reborn = worker("d1", Role.DECODE, url=decode.url, incarnation="i2")
    await cluster.join(reborn)
    await until(lambda: (decode.aborted, decode.in_flight) == (1, 1))  # the new one has it
    decode.hold.set()
    status, _, _ = await asyncio.wait_for(request, LEEWAY * RECOVERED_S)
    assert status == 200


async def test_without_workers_every_request_is_a_503(cluster: Cluster) -> None:
    status, answer, headers = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert (status, headers["retry-after"]) == (503, "1")
    assert "/health" in answer["error"]["message"]
    async with cluster.http.get("/health") as response:
        assert response.status == 503
        assert "start one" in (await response.json())["why"]


async def test_a_milestone_of_an_unknown_transfer_is_counted(cluster: Cluster) -> None:
    await cluster.join(store())
    await cluster.members["s1"].event("nobody/0/0", Stage.LOADED)
    await until(lambda: cluster.router.brain.milestones.unknown == 1)
    assert await cluster.metric("kvrelay_unknown_transfers_total") == 1


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_fifty_client_errors_open_no_breaker(cluster: Cluster, name: str) -> None:
    await cluster.split()
    refuser = cluster.workers[name]
    refuser.refuse, refuser.refusal = 400, b'{"error":{"message":"no","code":400}}'
    for _ in range(50):
        status, _, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert status == 400
    refuser.refuse = 0
    await cluster.complete()
    assert await cluster.metric("kvrelay_breakers_opened_total") == 0


@pytest.mark.parametrize("name", ["p1", "d1"])
async def test_a_client_error_between_failures_shows_that_the_worker_answers(cluster: Cluster, name: str) -> None:
    await cluster.split()
    refuser = cluster.workers[name]
    for status in [*[500] * 4, 400, 500]:
        refuser.refuse, refuser.refusal = status, b'{"error":{"message":"no"}}'
        await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert cluster.router.brain.outcomes.breakers.of(name).failures == 1
    assert await cluster.metric("kvrelay_breakers_opened_total") == 0


def set_pause(cluster: Cluster, worker: str, pause_s: float) -> None:
    """Let the breaker of ``worker``, which is open, allow the next probe so long after it was opened."""
    breakers = cluster.router.brain.outcomes.breakers
    assert breakers.of(worker).state is State.OPEN
    breakers._breakers[worker] = msgspec.structs.replace(breakers.of(worker), pause_s=pause_s)


@pytest.mark.slow
async def test_an_open_breaker_answers_at_once_and_closes_after_one_good_probe(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    decode.refuse = 500
    for _ in range(50):
        status, _, headers = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert (status, int(headers["retry-after"]) >= 1) == (503, True)
    assert await cluster.metric("kvrelay_breakers_opened_total") == 1
    set_pause(cluster, "d1", 3600.0)
    asked = len(decode.bodies()), len(prefill.bodies())
    assert asked[0] < 10
    status, answer, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert status == 503
    assert "ready" in answer["error"]["message"]
    # No half of a hand-off either: no P computes for an answer that nobody will write.
    assert (len(decode.bodies()), len(prefill.bodies())) == asked
    decode.refuse = 0
    set_pause(cluster, "d1", 0.5)
    await until(lambda: cluster.router.brain.outcomes.breakers.allows("d1", time.monotonic()))
    await cluster.complete()
    assert await cluster.metric('kvrelay_worker_breaker_open{role="decode",worker="d1"}') == 0


async def test_while_every_p_fails_d_computes_the_prompts_without_asking_them(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    prefill.refuse = 500
    for _ in range(20):
        await cluster.complete()
    assert len(prefill.bodies()) < 10
    assert len(decode.bodies()) == 20
    assert await cluster.metric('kvrelay_local_requests_total{reason="no_prefill"}') > 0


async def test_while_every_p_fails_there_is_no_half_of_a_hand_off_where_d_is_to_compute_nothing(
    model_folder: Path,
) -> None:
    config = RouterConfig(port=0, control_port=0, local_prefill="never")
    async with Cluster(model_folder, router_config=config) as cluster:
        prefill, decode = await cluster.split()
        prefill.refuse = 500
        while cluster.router.brain.outcomes.breakers.allows("p1", time.monotonic()):
            await cluster.complete()
        set_pause(cluster, "p1", 3600.0)
        asked = len(prefill.bodies()), len(decode.bodies())
        await cluster.complete()
        assert (len(prefill.bodies()), len(decode.bodies())) == (asked[0], asked[1] + 1)
        assert "kv_transfer_params" not in decode.bodies()[-1], "D waits for pages of nobody"
        await cluster.at_rest()
