"""A client whose answer loses its decode worker in the middle sees a pause, and else what it would have seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.config import RouterConfig
from kvrelay.fleet.chooser import Open
from kvrelay.fleet.flight import Ask, Plan, PullPages
from kvrelay.fleet.pick import Pick
from kvrelay.protocol.engine import PrefillLeg
from kvrelay.protocol.feed import PushOrder
from kvrelay.router.defaults import Defaults
from kvrelay.types import Role
from tests.fleet.values import fingerprint, store
from tests.patience import PATIENCE_S, until
from tests.router.scripted_fleet import CHAT, TEXT, USAGE, Fleet, hand_over, hung, running
from tests.router.scripted_vllm import ScriptedVllm

FAULTS = ["reset", "eof", "abort", "error"]


@pytest.fixture
async def fleet(model_folder: Path) -> AsyncIterator[Fleet]:
    async with running(model_folder) as fleet:
        yield fleet


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "kind", [{}, pytest.param({"messages": CHAT}, marks=pytest.mark.slow)], ids=["completion", "chat"]
)
async def test_wherever_an_answer_is_cut_off_its_client_gets_it_whole(
    fleet: Fleet, kind: dict[str, Any], fault: str
) -> None:
    calm = await fleet.ask(**kind, **USAGE)
    assert calm.texts == {0: TEXT}
    fleet.script.fault = fault
    for after in range(1, len(fleet.script.ids)):
        fleet.script.after = after
        cut = await fleet.ask(**kind, **USAGE)
        assert (cut.texts, cut.finishes, cut.last) == (calm.texts, calm.finishes, b"data: [DONE]"), after
        assert cut.raw.count(b"[DONE]") == 1
        assert len(cut.ids) == 1, "all events are of one answer"
        assert b'_ids":[' not in cut.raw, "the router asked for token ids, the client did not"
        assert [usage["completion_tokens"] for usage in cut.usages] == [len(fleet.script.ids)]
        assert cut.usages[0]["prompt_tokens"] == calm.usages[0]["prompt_tokens"]
    assert fleet.script.struck == len(fleet.script.ids) - 1
    assert await fleet.resumes("failed") == 0


@pytest.mark.parametrize("after", [10, 25])
async def test_a_client_that_wants_token_ids_gets_each_once(fleet: Fleet, after: int) -> None:
    fleet.script.after = after
    events = await fleet.cluster.stream(return_token_ids=True, max_tokens=500)
    said = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert [token for each in said for token in each["choices"][0]["token_ids"]] == fleet.script.ids


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["quick", "brown 🦊 ju", "über the la", "s", "never"])
async def test_stop_strings_end_an_answer_wherever_the_cut_lies(fleet: Fleet, stop: str) -> None:
    calm = await fleet.ask(stop=[stop, "zzz"])
    assert calm.texts == {0: TEXT.split(stop)[0]}
    tokens = next((n for n in range(len(fleet.script.ids)) if stop in fleet.script.visible(n)), 20)
    for after in range(1, tokens):
        fleet.script.after = after
        cut = await fleet.ask(stop=[stop, "zzz"])
        assert (cut.texts, cut.finishes, cut.last) == (calm.texts, calm.finishes, b"data: [DONE]"), after


@pytest.mark.parametrize("body", [{}, {"stop": ["over the lazy"]}, {"n": 2}], ids=["plain", "stop", "two"])
async def test_tokens_with_log_probabilities_begin_where_they_would_without_a_cut(
    fleet: Fleet, body: dict[str, Any]
) -> None:
    calm = await fleet.ask(logprobs=1, **body)
    offsets = [offset for _, offset in calm.logprobs[0]]
    assert (offsets[0], offsets) == (0, sorted(offsets))
    for after in range(1, len(offsets), 5):
        fleet.script.after, fleet.script.again_after = after, 30
        assert (await fleet.ask(logprobs=1, **body)).logprobs == calm.logprobs, after


async def test_every_choice_goes_on_by_itself(fleet: Fleet) -> None:
    calm = await fleet.ask(n=3, **USAGE)
    assert calm.texts == dict.fromkeys(range(3), TEXT)
    for after in (1, 20, 55):
        fleet.script.after = after
        cut = await fleet.ask(n=3, **USAGE)
        assert (cut.texts, cut.finishes, cut.last) == (calm.texts, calm.finishes, b"data: [DONE]")
        assert [usage["completion_tokens"] for usage in cut.usages] == [3 * len(fleet.script.ids)]


@pytest.mark.parametrize("replays", [False, True])
async def test_every_choice_of_a_chat_tells_its_role_once(model_folder: Path, replays: bool) -> None:
    async with running(model_folder, replays=replays) as fleet:
        calm = await fleet.ask(messages=CHAT, n=3)
        assert calm.roles == {index: ["assistant"] for index in range(3)}
        for fleet.script.after_roles in (1, 2):
            cut = await fleet.ask(messages=CHAT, n=3)
            assert (cut.roles, cut.texts) == (calm.roles, calm.texts)
        assert fleet.script.struck == 2


@pytest.mark.slow
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("kind", [{}, {"messages": CHAT}], ids=["completion", "chat"])
async def test_token_ids_that_only_the_router_asked_for_reach_nobody(
    model_folder: Path, kind: dict[str, Any], replays: bool
) -> None:
    async with running(model_folder, replays=replays) as fleet:
        for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
            for fleet.script.after, fleet.script.after_roles in (
                (None, None),
                (None, 1),
                (1, None),
                (2, None),
                (40, None),
            ):
                said = await fleet.ask(**kind, n=2, stream_options=options)
                assert b'_ids":[' not in said.raw.replace(b" ", b"")
                assert said.texts == dict.fromkeys(range(2), TEXT)
        route = "/v1/chat/completions" if kind else "/v1/completions"
        asked = [body for fake in fleet.cluster.workers.values() for body in fake.bodies(route) if body.get("stream")]
        assert all(body["return_token_ids"] for body in asked)


async def test_of_an_answer_in_a_piece_nobody_asks_for_token_ids(fleet: Fleet) -> None:
    await fleet.cluster.complete(n=2)
    bodies = [body for fake in fleet.cluster.workers.values() for body in fake.bodies() if not body.get("stream")]
    assert bodies
    assert all("return_token_ids" not in body for body in bodies)


async def test_a_client_that_wants_the_ids_of_the_prompt_gets_them_of_every_choice(fleet: Fleet) -> None:
    for fleet.script.after in (None, 1):
        events = await fleet.cluster.stream(return_token_ids=True, max_tokens=500, n=2)
        choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events[:-1]]
        prompts = {choice["index"]: choice["prompt_token_ids"] for choice in reversed(choices)}
        told = [choice for choice in choices if choice["prompt_token_ids"]]
        assert [choice["index"] for choice in told] == [0, 1], prompts
        assert told[0]["prompt_token_ids"] == told[1]["prompt_token_ids"] == fleet.script.prompts[0]


async def test_limits_count_what_was_written_before(fleet: Fleet) -> None:
    fleet.script.after = 5
    cut = await fleet.ask(max_tokens=12, min_tokens=8)
    assert cut.texts == {0: fleet.script.visible(12)}
    assert cut.finishes == {0: ["length"]}
    (rest,) = [body for fake in fleet.cluster.workers.values() for body in fake.bodies() if body.get("min_tokens") == 3]
    assert rest["max_tokens"] == 7


async def test_the_rest_obeys_what_the_model_itself_says_of_requests(model_folder: Path) -> None:
    async with running(model_folder, defaults=Defaults(max_new_tokens=12)) as fleet:
        fleet.script.after = 5
        cut = await fleet.ask(messages=CHAT, max_tokens=None)
        assert (cut.texts, cut.finishes) == ({0: fleet.script.visible(12)}, {0: ["length"]})
    async with running(model_folder, defaults=Defaults(presence_penalty=0.5)) as fleet:
        fleet.script.after = 4
        assert b'"code":502' in (await fleet.ask()).last, "it has a state, though the client asked for none"


async def test_a_rest_that_is_more_than_text_is_not_gone_on_with(fleet: Fleet) -> None:
    fleet.script.after, fleet.script.again_reasons = 4, True
    cut = await fleet.ask(messages=CHAT)
    assert b'"code":502' in cut.last
    assert b"reasoning" not in cut.raw


async def test_an_answer_outlives_several_losses(fleet: Fleet) -> None:
    fleet.script.after, fleet.script.again_after = 3, 9
    cut = await fleet.ask(**USAGE)
    assert (cut.texts, cut.last) == ({0: TEXT}, b"data: [DONE]")
    assert fleet.script.struck > 3
    assert await fleet.resumes() == fleet.script.struck


async def test_what_was_cut_off_after_its_last_token_needs_no_other_worker(fleet: Fleet) -> None:
    fleet.script.after = len(fleet.script.ids)
    cut = await fleet.ask(**USAGE)
    assert (cut.texts, cut.last, len(cut.usages)) == ({0: TEXT}, b"data: [DONE]", 1)
    assert await fleet.resumes() == 0


async def test_when_all_are_gone_the_answer_ends_in_an_error_and_without_done(fleet: Fleet) -> None:
    fleet.script.after = fleet.script.again_after = 0
    fleet.script.after = 4
    cut = await fleet.ask()
    assert b'"code":502' in cut.last
    assert b"DONE" not in cut.raw
    assert TEXT.startswith(cut.texts[0])
    assert await fleet.resumes("failed") == 2


@pytest.mark.parametrize(
    "body", [{"seed": 0}, {"presence_penalty": 0.5}, {"echo": True}, {"a_new_field": 0}, {"include_reasoning": False}]
)
async def test_where_workers_cannot_replay_what_has_a_state_ends_in_an_error(
    fleet: Fleet, body: dict[str, Any]
) -> None:
    fleet.script.after = 4
    cut = await fleet.ask(**body)
    assert b'"code":502' in cut.last
    assert fleet.script.struck == 1


STATEFUL: list[dict[str, Any]] = [
    {"seed": 7},
    {"presence_penalty": 0.5, "stop": ["über the la"]},
    {"messages": CHAT, "response_format": {"type": "json_object"}},
    {"seed": 0, "n": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("body", STATEFUL, ids=lambda body: next(iter(body)))
async def test_what_has_a_state_over_the_output_is_written_again_and_what_was_sent_is_dropped(
    model_folder: Path, body: dict[str, Any]
) -> None:
    async with running(model_folder, replays=True) as fleet:
        calm = await fleet.ask(**body, **USAGE)
        for after in range(1, len(fleet.script.ids), 3):
            fleet.script.after = after
            cut = await fleet.ask(**body, **USAGE)
            assert (cut.texts, cut.finishes, cut.last) == (calm.texts, calm.finishes, b"data: [DONE]"), after
            assert [usage["completion_tokens"] for usage in cut.usages] == [
                usage["completion_tokens"] for usage in calm.usages
            ]
        assert fleet.script.struck > 5
        assert await fleet.resumes("failed") == 0


async def test_each_choice_is_replayed_with_the_seed_that_it_had(model_folder: Path) -> None:
    async with running(model_folder, replays=True) as fleet:
        fleet.script.after = 9
        await fleet.ask(seed=5, n=3)
        bodies = [body for fake in fleet.cluster.workers.values() for body in fake.bodies() if "vllm_xargs" in body]
        assert sorted(body["seed"] for body in bodies) == [5, 6, 7]
        assert all("n" not in body for body in bodies)


async def test_a_replay_that_writes_something_else_is_not_passed_on(model_folder: Path) -> None:
    async with running(model_folder, 3, replays=True) as fleet:
        fleet.script.after, fleet.script.again_text = 6, "one two, something else altogether"
        cut = await fleet.ask(seed=1)
        assert b'"code":502' in cut.last
        assert TEXT.startswith(cut.texts[0])
        replays = [body for fake in fleet.cluster.workers.values() for body in fake.bodies() if "vllm_xargs" in body]
        assert len(replays) == 1, "a third worker would write the same"


async def test_fields_that_say_what_is_meant_anyway_do_not_keep_an_answer_from_going_on(fleet: Fleet) -> None:
    fleet.script.after = 4
    cut = await fleet.ask(seed=None, presence_penalty=0, frequency_penalty=0.0, echo=False, logprobs=None)
    assert (cut.texts, cut.last) == ({0: TEXT}, b"data: [DONE]")


async def test_answers_do_not_go_on_where_that_is_switched_off(model_folder: Path) -> None:
    config = RouterConfig(port=0, control_port=0, resume=False)
    async with running(model_folder, router_config=config) as fleet:
        fleet.script.after = 4
        assert b'"code":502' in (await fleet.ask()).last
        assert all("return_token_ids" not in body for fake in fleet.cluster.workers.values() for body in fake.bodies())


async def test_tokens_that_do_not_make_the_text_that_was_sent_are_not_gone_on_from(fleet: Fleet) -> None:
    fleet.script.after = 6
    visible = fleet.script.visible
    fleet.script.visible = lambda count: visible(count).upper()  # type: ignore[method-assign]
    cut = await fleet.ask()
    assert cut.texts == {0: visible(6).upper()}
    assert b'"code":502' in cut.last


async def test_a_client_that_goes_away_while_its_answer_is_resumed_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.script.fault, fleet.script.after, fleet.script.again_after = "hang", 4, 3
    prefill = fleet.cluster.workers["p1"]
    asked = asyncio.create_task(fleet.ask())
    await until(lambda: fleet.script.struck == 1)
    prefill.hold.clear()
    name = fleet.cluster.router.brain.ledger.get(next(iter(fleet.cluster.router.brain._flights))).decode_worker  # type: ignore[union-attr]
    await fleet.cluster.members[str(name)].leave()
    await until(lambda: fleet.script.struck == 2 or prefill.in_flight == 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    prefill.hold.set()


# ---------------------------------------------------------------- hangs


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["silence", "no progress"])
async def test_a_stream_goes_on_elsewhere_when_its_worker_hangs(model_folder: Path, sign: str) -> None:
    async with running(model_folder, dead_after_s=0.6) as fleet:
        fleet.script.fault, fleet.script.after = "hang", 6
        for name in ("d1", "d2"):
            fleet.cluster.members[name].progress = 1
        asked = asyncio.create_task(fleet.ask(**USAGE))
        await until(lambda: fleet.script.struck == 1)
        worker = hung(fleet)
        fleet.cluster.members[worker].silent = sign == "silence"
        cut = await asyncio.wait_for(asked, PATIENCE_S)
        assert (cut.texts, cut.last, len(cut.usages)) == ({0: TEXT}, b"data: [DONE]", 1)
        assert not fleet.cluster.is_ready(worker), "it gets no new requests either"
        assert await fleet.cluster.metric('kvrelay_resumes_total{outcome="resumed",reason="silent"}') == 1
        assert await fleet.cluster.metric("kvrelay_resume_pause_seconds_count") == 1
        assert await fleet.cluster.metric("kvrelay_resume_strategies_total") == 1
        fleet.cluster.members[worker].silent = False
        fleet.cluster.members[worker].progress = 2
        await until(lambda: fleet.cluster.is_ready(worker))


@pytest.mark.slow
async def test_streams_that_flow_outlive_the_silence_of_all_heartbeats(model_folder: Path) -> None:
    async with running(model_folder, dead_after_s=0.4) as fleet:
        fleet.script.pause_s = 0.05
        asked = asyncio.create_task(fleet.ask(**USAGE))
        workers = fleet.cluster.router.brain.fleet.workers
        await until(lambda: len(fleet.cluster.router.brain._flights) == 1)
        for member in fleet.cluster.members.values():
            member.silent = True
        await until(lambda: len(workers.given_up(time.monotonic())) == 3)
        assert not asked.done()
        cut = await asyncio.wait_for(asked, PATIENCE_S)
        assert (cut.texts, cut.last) == ({0: TEXT}, b"data: [DONE]")
        assert await fleet.resumes() == await fleet.resumes("failed") == 0


@pytest.mark.slow
async def test_a_worker_that_is_slow_and_makes_progress_keeps_its_stream(model_folder: Path) -> None:
    async with running(model_folder, dead_after_s=0.6) as fleet:
        fleet.script.fault, fleet.script.after = "hang", 6
        for name in ("d1", "d2"):
            fleet.cluster.members[name].works = True
        asked = asyncio.create_task(fleet.ask())
        await until(lambda: fleet.script.struck == 1)
        member = fleet.cluster.members[hung(fleet)]
        await asyncio.sleep(1.5)  # far longer than it would take to leave it for another
        assert fleet.script.struck == 1
        assert not asked.done()
        await member.leave()
        assert (await asyncio.wait_for(asked, PATIENCE_S)).texts == {0: TEXT}


@pytest.mark.slow
async def test_the_only_worker_is_waited_for(model_folder: Path) -> None:
    async with running(model_folder, decodes=1, dead_after_s=0.6) as fleet:
        fleet.script.fault, fleet.script.after = "hang", 6
        fleet.cluster.members["d1"].progress = 1
        asked = asyncio.create_task(fleet.ask())
        await until(lambda: fleet.script.struck == 1)
        await asyncio.sleep(1.0)  # far longer than it would take to leave it for another
        assert fleet.cluster.is_ready("d1"), "nobody else would take new requests"
        assert not asked.done()
        await fleet.add("d2")
        assert (await asyncio.wait_for(asked, PATIENCE_S)).texts == {0: TEXT}


async def test_a_resumption_is_explained(fleet: Fleet) -> None:
    fleet.script.after = 7
    async with fleet.cluster.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 500}
    ) as response:
        await response.read()
        request_id = response.headers["x-request-id"]
    async with fleet.cluster.http.get(f"/kvrelay/requests/{request_id}") as response:
        record = await response.json()
    (loss,) = record["resumptions"]
    assert (loss["reason"], loss["outcome"], loss["tokens"], loss["manner"]) == ("reset", "resumed", 7, "continue")
    assert {loss["lost_worker"], loss["worker"]} == {"d1", "d2"}
    assert loss["pause_s"] > 0
    assert "resume" in [choice["about"] for choice in record["decision"]]


async def test_a_prefill_worker_that_takes_the_rest_for_a_wrong_request_does_not_end_the_answer(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, chooser = fleet.cluster.workers["p1"], fleet.cluster.router.brain._chooser

    def over_p(ask: Ask, tried: Collection[str], now: float) -> Pick | None:
        topology = chooser.topology(ask.facts.model, now)
        decodes = [at for at, name in enumerate(topology.decode_columns.names) if name not in tried]
        open_to = Open(prefills=range(len(topology.prefill_workers)), decodes=decodes, computing=())
        return chooser._choose_for_all(ask, topology, open_to, now, may_wait=False)

    monkeypatch.setattr(chooser, "resume", over_p)

    async def then_refuse(_: PrefillLeg) -> None:
        prefill.refuse = 400

    prefill.on_prefill = then_refuse
    fleet.script.after = 4
    cut = await fleet.ask(**USAGE)
    assert (cut.texts, cut.last) == ({0: TEXT}, b"data: [DONE]")
    assert len(prefill.bodies()) == 2, "it was asked for the rest as well"


# ---------------------------------------------------------------- pages in another node's store


async def test_pages_that_the_rest_waits_for_are_asked_of_the_store_that_has_them(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.script.after = 4
    recovery, order = (
        fleet.cluster.router.brain.recovery,
        PushOrder(transfer="t/pull/1", names=[], total_tokens=0, format=fingerprint().format, push_to="127.0.0.1:1"),
    )
    lost = recovery.lost

    def pulling(request_id: str, *args: Any, **more: Any) -> Any:
        plan = lost(request_id, *args, **more)
        assert isinstance(plan, Plan)
        pull = PullPages(request_id=request_id, store="s1", order=order)
        return msgspec.structs.replace(plan, pulls=(pull,))

    monkeypatch.setattr(recovery, "lost", pulling)
    assert (await fleet.ask()).texts == {0: TEXT}
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(told := await fleet.cluster.members["s1"].link.recv(), PushOrder):
            pass
    assert told == order


async def test_an_answer_goes_on_at_a_worker_of_another_node_that_refused_it_at_first(model_folder: Path) -> None:
    async with running(model_folder, decodes=0) as fleet:
        await fleet.cluster.join(store("s2", "127.0.0.1:9002"))
        fakes = [ScriptedVllm(tokens=fleet.cluster.tokens, script=fleet.script) for _ in range(2)]
        for number, fake in enumerate(fakes, start=1):
            await fleet.cluster.add(f"d{number}", Role.DECODE, store_name=f"s{number}", fake=fake)
        fakes[0].first = fakes[1].first = asyncio.Event()
        fleet.script.after = 3
        cut = await fleet.ask(**USAGE)
        assert (cut.texts, cut.last) == ({0: TEXT}, b"data: [DONE]")
        assert (fleet.script.struck, sum(len(fake.bodies()) for fake in fakes)) == (1, 3)


# ---------------------------------------------------------------- drained


async def test_a_stream_leaves_a_worker_that_drains_when_another_can_go_on(fleet: Fleet) -> None:
    fleet.script.fault, fleet.script.after = "hang", 6
    asked = asyncio.create_task(fleet.ask(**USAGE))
    await until(lambda: fleet.script.struck == 1)
    brain, worker = fleet.cluster.router.brain, hung(fleet)
    brain.drains.begin(worker, time.monotonic())
    hand_over(fleet, worker)
    hand_over(fleet, worker)
    cut = await asyncio.wait_for(asked, PATIENCE_S)
    assert (cut.texts, cut.last) == ({0: TEXT}, b"data: [DONE]")
    assert await fleet.cluster.metric('kvrelay_resumes_total{outcome="resumed",reason="drained"}') == 1


async def test_a_stream_stays_with_a_worker_that_drains_as_long_as_nobody_can_go_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.script.fault, fleet.script.after = "hang", 6
    asked = asyncio.create_task(fleet.ask(**USAGE))
    await until(lambda: fleet.script.struck == 1)
    brain, worker = fleet.cluster.router.brain, hung(fleet)
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(brain.recovery, "hand_over", lambda name, *_, **__: calls.append(name))
        brain.drains.begin(worker, time.monotonic())
        hand_over(fleet, worker)
        await until(lambda: len(calls) == 1)
    assert fleet.cluster.workers[worker].in_flight == 1, "it was not hung up on"
    assert not asked.done()
    hand_over(fleet, worker)
    assert (await asyncio.wait_for(asked, PATIENCE_S)).texts == {0: TEXT}
