"""What a client sees whose request its workers do not outlive, and how many of them it reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.types import Role
from tests.fleet.values import store, worker
from tests.held_port import held_port
from tests.router.cluster import Cluster
from tests.router.fake_vllm import FakeVllm
from tests.router.scripted_fleet import running

ENDED = "kvrelay_harmful_requests_total"
ASKED = {"model": "tiny", "prompt": "Hello, you"}


async def decodes(cluster: Cluster, count: int) -> list[FakeVllm]:
    """So many D's, and one P."""
    _, first = await cluster.split()
    return [first, *[await cluster.add(f"d{number}", Role.DECODE) for number in range(2, count + 1)]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_two_workers_did_not_outlive_reaches_no_third(cluster: Cluster, stream: bool) -> None:
    workers = await decodes(cluster, 4)
    for each in workers:
        each.reset = True
    status, answer, headers = await cluster.post("/v1/completions", {**ASKED, "stream": stream})
    assert (status, headers["x-should-retry"]) == (500, "false")
    assert "2 workers in a row" in answer["error"]["message"]
    assert sum(len(each.bodies()) for each in workers) == 2
    assert await cluster.metric(ENDED) == 1
    await cluster.at_rest()


@pytest.mark.parametrize("fault", ["whole", "stream", "event"])
async def test_a_request_at_which_two_workers_fail_that_live_reaches_no_third_and_may_be_sent_again(
    cluster: Cluster, fault: str
) -> None:
    workers = await decodes(cluster, 4)
    for each in workers:
        each.refuse, each.error_after = 500 if fault != "event" else 0, 0
    status, _, headers = await cluster.post("/v1/completions", {**ASKED, "stream": fault != "whole"})
    assert (status, headers["retry-after"]) == (503, "1")
    assert sum(len(each.bodies()) for each in workers) == 2
    assert await cluster.metric(ENDED) == 0
    await cluster.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_workers_that_have_no_room_are_all_asked_and_the_client_may_ask_again(
    cluster: Cluster, stream: bool
) -> None:
    workers = await decodes(cluster, 4)
    for each in workers:
        each.refuse, each.error_after, each.error_code = 0 if stream else 503, 0, 503
    status, _, headers = await cluster.post("/v1/completions", {**ASKED, "stream": stream})
    assert (status, headers["retry-after"]) == (503, "1")
    assert [len(each.bodies()) for each in workers] == [1] * 4
    assert await cluster.metric(ENDED) == 0


async def test_workers_that_nobody_can_reach_are_held_against_no_request(cluster: Cluster) -> None:
    await cluster.join(store())
    with held_port() as port:
        for number in range(3):
            await cluster.join(worker(f"d{number}", Role.BOTH, url=f"http://127.0.0.1:{port}"))
        await cluster.add("d9", Role.BOTH, checked=False)
        for _ in range(4):
            assert (await cluster.complete())["choices"][0]["text"] == "one two three"
    assert await cluster.metric(ENDED) == 0


async def test_a_prompt_that_two_prefill_workers_did_not_outlive_reaches_no_third_and_no_d(cluster: Cluster) -> None:
    first, decode = await cluster.split()
    prefills = [first, *[await cluster.add(f"p{number}", Role.PREFILL) for number in range(2, 5)]]
    for each in prefills:
        each.reset = True
    status, answer, _ = await cluster.post("/v1/completions", ASKED)
    assert (status, "2 workers in a row" in answer["error"]["message"]) == (500, True)
    assert (sum(len(each.bodies()) for each in prefills), decode.bodies()) == (2, [])
    await cluster.at_rest()


async def test_a_stream_whose_rest_two_workers_did_not_outlive_ends_and_says_why(model_folder: Path) -> None:
    async with running(model_folder, decodes=5) as fleet:
        fleet.script.after, fleet.script.again_after = 4, 0
        cut = await fleet.ask()
        assert b"2 workers in a row" in cut.last
        assert b"DONE" not in cut.raw
        assert fleet.script.struck == 3, "one that wrote, and two that did not"
        assert await fleet.cluster.metric(ENDED) == 1


async def test_a_rest_that_workers_give_up_is_held_to_nothing(model_folder: Path) -> None:
    async with running(model_folder, decodes=5) as fleet:
        fleet.script.fault, fleet.script.after, fleet.script.again_after = "abort", 4, 0
        cut = await fleet.ask()
        assert b"send the request again" in cut.last
        assert fleet.script.struck == 5
        assert await fleet.cluster.metric(ENDED) == 0
