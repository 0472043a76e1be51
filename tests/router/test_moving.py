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
from kvrelay.fleet.flight import DispatchDecode
from kvrelay.policy.admit import Slo
from kvrelay.router.answers import Stream
from kvrelay.router.desk import Desk
from kvrelay.router.exchange import Exchange
from kvrelay.router.keys import OPEN
from kvrelay.router.prompts import Prompts
from kvrelay.router.request import Kind, parse
from tests.patience import until
from tests.router.scripted_fleet import TEXT, Fleet, hand_over, heard, hung, running

ID = "req-1"


@pytest.fixture
async def fleet(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """Its prompts are computed by P, always."""
    choose = Chooser._choose

    def split(self: Chooser, prompt: Any, names: Any, ground: Any, open_to: Open, now: float, **more: Any) -> Any:
        computing = () if open_to.readers else open_to.computing
        return choose(self, prompt, names, ground, open_to._replace(computing=computing), now, **more)

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
    worker = desk.workers_of("tiny")[0]
    return desk.open(request, prompts, worker, request_id=ID, tenant=OPEN, slo=Slo(), received_s=now)


async def streaming(exchange: Exchange) -> tuple[AsyncIterator[bytes], list[bytes]]:
    """The rest of the answer, and its first piece."""
    stream = await exchange.answer()
    assert isinstance(stream, Stream)
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


async def test_a_stream_does_not_move_while_a_worker_is_asked_for_its_rest(fleet: Fleet) -> None:
    """The next question of whoever drains comes when it can."""
    await fleet.add("d3")
    reading, following = await asked_for_the_rest(fleet)
    drain(fleet)
    await asyncio.sleep(0.05)
    assert hung(fleet) == following
    fleet.cluster.workers[following].hold.set()
    assert await reading == TEXT
    desk_of(fleet).close(ID, 200)


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
