"""A stream that leaves a draining worker, at every moment at which its client may be slow, or be gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.fleet.chooser import Chooser, Open
from kvrelay.fleet.flight import AbandonDecode, DispatchDecode
from kvrelay.policy.admit import Slo
from kvrelay.policy.loss import LossReason
from kvrelay.router.answers import StreamedAnswer
from kvrelay.router.desk import Desk
from kvrelay.router.exchange import Exchange
from kvrelay.router.keys import OPEN
from kvrelay.router.prefills import Prefills
from kvrelay.router.prompts import Prompts
from kvrelay.router.request import Kind, parse
from kvrelay.router.stream_resumption import StreamResumption
from tests.patience import PATIENCE_S, until
from tests.router.scripted_fleet import TEXT, Fleet, hand_over, heard, hung, running

ID = "req-1"


@pytest.fixture
async def fleet(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """Its prompts are computed by P, always."""
    choose = Chooser._choose

    def split(self: Chooser, prompt: Any, names: Any, topology: Any, open_to: Open, now: float, **more: Any) -> Any:
        computing = () if open_to.prefills else open_to.computing
        return choose(self, prompt, names, topology, open_to._replace(computing=computing), now, **more)

    monkeypatch.setattr(Chooser, "_choose", split)
    async with running(model_folder) as fleet:
        fleet.script.fault, fleet.script.after = "hang", 6
        yield fleet


def desk_of(fleet: Fleet) -> Desk:
    desk = fleet.cluster.router._readings.desk
    assert desk is not None
    return desk


async def opened(fleet: Fleet) -> Exchange:
    """A request whose client reads when the test does."""
    desk, ids = desk_of(fleet), await fleet.cluster.tokens.encode("Hello, you", special=True)
    request = parse(Kind.COMPLETION, json.dumps({"prompt": ids, "max_tokens": 500, "stream": True}).encode())
    prompts, now = Prompts(ids=[ids], lengths=(len(ids),)), time.monotonic()
    ready = desk.ready("tiny")
    return desk.open(request, prompts, ready, request_id=ID, tenant=OPEN, slo=Slo(), received_s=now)


async def streaming(exchange: Exchange) -> tuple[AsyncIterator[bytes], list[bytes]]:
    """The rest of the answer, and its first piece."""
    stream = await exchange.answer()
    assert isinstance(stream, StreamedAnswer)
    return stream.blocks, [await anext(stream.blocks)]


def drain(fleet: Fleet) -> None:
    worker = hung(fleet)
    fleet.cluster.router.brain.drains.begin(worker, time.monotonic())
    hand_over(fleet, worker)


def prompts_of(fleet: Fleet) -> list[list[int]]:
    """What P was asked to compute."""
    return [body["prompt"] for body in fleet.cluster.workers["p1"].bodies() if "kv_transfer_params" in body]


async def text_of(blocks: AsyncIterator[bytes], read: list[bytes]) -> str:
    events = [event async for block in blocks for event in block.split(b"\n\n") if event]
    before = [event for event in b"".join(read).split(b"\n\n") if event]
    return heard(before + events).texts[0]


async def test_the_prompt_of_a_stream_that_moves_is_computed_while_its_client_reads_nothing(fleet: Fleet) -> None:
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    drain(fleet)
    await until(lambda: len(prompts_of(fleet)) == 2)
    first, again = prompts_of(fleet)
    assert again[: len(first)] == first
    assert len(again) > len(first), "what was written is part of it"
    assert await text_of(blocks, read) == TEXT
    assert len(prompts_of(fleet)) == 2
    desk_of(fleet).close(ID, 200)


async def test_a_client_that_is_told_to_go_on_before_it_looks_still_has_its_prompt_computed(fleet: Fleet) -> None:
    fleet.cluster.workers["p1"].hold.set()
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    fleet.cluster.workers["p1"].hold.clear()
    drain(fleet)
    await until(lambda: len(prompts_of(fleet)) == 2)
    desk_of(fleet).obey([DispatchDecode(request_id=ID)])
    assert await text_of(blocks, read) == TEXT
    desk_of(fleet).close(ID, 200)
    fleet.cluster.workers["p1"].hold.set()


async def test_a_client_that_hangs_up_after_its_stream_moved_leaves_nothing_behind(fleet: Fleet) -> None:
    await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    fleet.cluster.workers["p1"].hold.clear()
    drain(fleet)
    await until(lambda: len(prompts_of(fleet)) == 2)
    desk_of(fleet).close(ID, 499)
    await until(lambda: fleet.cluster.workers["p1"].in_flight == 0)
    fleet.cluster.workers["p1"].hold.set()


async def test_a_stream_whose_next_worker_leaves_before_its_client_looks_goes_on_at_a_third(fleet: Fleet) -> None:
    await fleet.add("d3")
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    before = hung(fleet)
    drain(fleet)
    await until(lambda: len(prompts_of(fleet)) == 2)
    following = hung(fleet)
    assert following != before
    await fleet.cluster.members[following].leave()
    await until(lambda: not fleet.cluster.is_ready(following))
    assert await text_of(blocks, read) == TEXT
    desk_of(fleet).close(ID, 200)


async def test_a_stream_moves_on_when_the_worker_it_moved_to_drains_before_its_client_looks(fleet: Fleet) -> None:
    await fleet.add("d3")
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    drain(fleet)
    await until(lambda: len(prompts_of(fleet)) == 2)
    drain(fleet)
    await until(lambda: len(prompts_of(fleet)) == 3)
    assert await text_of(blocks, read) == TEXT
    desk_of(fleet).close(ID, 200)


async def test_a_prefill_worker_that_leaves_while_it_computes_the_rest_of_a_prompt_is_not_waited_for(
    fleet: Fleet,
) -> None:
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    fleet.cluster.workers["p1"].hold.clear()
    drain(fleet)
    await until(lambda: len(prompts_of(fleet)) == 2)
    await fleet.cluster.members["p1"].leave()
    assert await text_of(blocks, read) == TEXT
    desk_of(fleet).close(ID, 200)
    fleet.cluster.workers["p1"].hold.set()


async def test_a_worker_that_leaves_while_it_is_asked_for_the_rest_is_followed_by_a_third(fleet: Fleet) -> None:
    await fleet.add("d3")
    reading, following = await asked_for_the_rest(fleet)
    await fleet.cluster.members[following].leave()
    await until(lambda: hung(fleet) != following)
    fleet.cluster.workers[hung(fleet)].hold.set()
    assert await reading == TEXT
    desk_of(fleet).close(ID, 200)
    fleet.cluster.workers[following].hold.set()


async def test_a_client_that_hangs_up_while_a_worker_is_asked_for_the_rest_leaves_nothing_behind(fleet: Fleet) -> None:
    reading, following = await asked_for_the_rest(fleet)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    desk_of(fleet).close(ID, 499)
    await until(lambda: fleet.cluster.workers[following].in_flight == 0)
    fleet.cluster.workers[following].hold.set()


async def asked_for_the_rest(fleet: Fleet) -> tuple[asyncio.Task[str], str]:
    """A client that reads on, and the worker that has its question and does not answer it."""
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    before = hung(fleet)
    others = [worker for name, worker in fleet.cluster.workers.items() if name not in ("p1", before)]
    for worker in others:
        worker.hold.clear()
    drain(fleet)
    reading = asyncio.create_task(text_of(blocks, read))
    await until(lambda: sum(worker.in_flight for worker in others) == 1)
    return reading, hung(fleet)


def resumption_of(fleet: Fleet) -> StreamResumption:
    """Of the request in flight."""
    resumption = desk_of(fleet)._open[ID]._resumption
    assert resumption is not None
    return resumption


class SlowText:
    """Turns tokens into text as always, and tells the first who asks when the test does."""

    def __init__(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = asyncio.Event()
        self.asked = 0
        self._text_after = fleet.cluster.tokens.text_after
        monkeypatch.setattr(fleet.cluster.tokens, "text_after", self)

    async def __call__(self, *given: Any, **how: Any) -> Any:
        self.asked += 1
        is_first = self.asked == 1
        text = await self._text_after(*given, **how)
        if is_first:
            await self.told.wait()
        return text


async def test_a_stream_moves_although_it_is_written_on_while_its_text_is_compared(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.script.after = 30
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    slow = SlowText(fleet, monkeypatch)
    drain(fleet)
    await until(lambda: slow.asked == 1)
    read.append(await anext(blocks))
    slow.told.set()
    await until(lambda: len(prompts_of(fleet)) == 2)
    first, again = prompts_of(fleet)
    assert len(again) == len(first) + 30, "what was written meanwhile is part of it"
    assert await text_of(blocks, read) == TEXT
    desk_of(fleet).close(ID, 200)


async def test_a_worker_that_took_over_meanwhile_is_not_left_for_the_one_before_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add("d3")
    fleet.script.again_after = 3
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    slow = SlowText(fleet, monkeypatch)
    drain(fleet)
    await until(lambda: slow.asked == 1)
    moving = resumption_of(fleet)._moving
    assert moving is not None
    reading = asyncio.create_task(text_of(blocks, read))
    await fleet.cluster.members[hung(fleet)].leave()
    await until(lambda: fleet.script.struck == 2)
    following, calls = hung(fleet), handed_over(fleet, monkeypatch)
    slow.told.set()
    await asyncio.wait([moving])
    assert (calls, hung(fleet)) == ([], following)
    fleet.script.again_after = None
    drain(fleet)
    assert await reading == TEXT
    assert len(calls) == 1, "it moves when it is to leave that worker"
    desk_of(fleet).close(ID, 200)


async def test_a_stream_leaves_a_worker_that_began_to_drain_while_it_was_asked_for_the_rest(fleet: Fleet) -> None:
    await fleet.add("d3")
    fleet.script.again_after = 3
    reading, following = await asked_for_the_rest(fleet)
    drain(fleet)
    await until(lambda: resumption_of(fleet)._to_leave is not None)
    assert hung(fleet) == following, "it writes something first"
    fleet.cluster.workers[following].hold.set()
    await until(lambda: hung(fleet) != following)
    fleet.script.again_after = None
    fleet.cluster.workers[hung(fleet)].hold.set()
    assert await reading == TEXT
    desk_of(fleet).close(ID, 200)


async def test_a_worker_does_not_inherit_the_drain_of_the_one_before_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add("d3")
    recovery = fleet.cluster.router.brain.recovery
    lost, calls = recovery.lost, handed_over(fleet, monkeypatch)

    def drained(request_id: str, *args: Any, **more: Any) -> Any:
        """The lost worker is to become empty while the answer waits for its turn."""
        with monkeypatch.context() as patch:
            patch.setattr(recovery, "_is_next", lambda *_: False)
            plan = lost(request_id, *args, **more)
        drain(fleet)
        return plan

    monkeypatch.setattr(recovery, "lost", drained)
    fleet.script.fault = "reset"
    blocks, read = await streaming(await opened(fleet))
    assert await text_of(blocks, read) == TEXT
    assert fleet.script.struck == 1
    assert calls == []
    desk_of(fleet).close(ID, 200)


async def test_a_worker_that_is_given_up_again_meanwhile_says_nothing_of_the_one_after_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add("d3")
    recovery, reasons = fleet.cluster.router.brain.recovery, list[str]()
    lost = recovery.lost

    def noted(*args: Any, reason: LossReason, **more: Any) -> Any:
        reasons.append(reason)
        plan = lost(*args, reason=reason, **more)
        fleet.script.again_after = 3 if len(reasons) == 1 else None
        desk_of(fleet).obey([AbandonDecode(request_id=ID, reason=LossReason.GONE)])
        return plan

    monkeypatch.setattr(recovery, "lost", noted)
    fleet.script.fault = "reset"
    blocks, read = await streaming(await opened(fleet))
    assert await text_of(blocks, read) == TEXT
    assert reasons == ["reset", "reset"]
    desk_of(fleet).close(ID, 200)


async def test_a_move_that_fails_half_way_is_a_loss_like_any_other(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.add("d3")
    blocks, read = await streaming(await opened(fleet))
    await until(lambda: fleet.script.struck == 1)
    with monkeypatch.context() as patch:
        failed = failing(patch, Prefills, "renew")
        drain(fleet)
        await until(lambda: failed == [1])
    assert await asyncio.wait_for(text_of(blocks, read), PATIENCE_S) == TEXT
    desk_of(fleet).close(ID, 200)


def failing(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """``name`` of ``owner`` fails; how often it did."""
    failed = [0]

    def fail(*_: object) -> None:
        failed[0] += 1
        raise RuntimeError("a bug")

    patch.setattr(owner, name, fail)
    return failed


def handed_over(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whoever is left from now on for another one."""
    recovery, calls = fleet.cluster.router.brain.recovery, list[str]()
    hand_over = recovery.hand_over

    def noted(*args: Any, **more: Any) -> Any:
        calls.append(hung(fleet))
        return hand_over(*args, **more)

    monkeypatch.setattr(recovery, "hand_over", noted)
    return calls
