"""For five seconds nothing passes between two parties, and nobody is told: no process dies, every answer is right."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import psutil
import pytest

from benchmarks.breaking.stopped import processes
from benchmarks.breaking.wires import Wire
from tests.serving import tiny
from tests.serving.conftest import Baseline
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.streams import Answer, bodies, equal_baseline, read, streams_through
from tests.serving.losses.whole import whole_again
from tests.serving.tiny import at_most

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

AWAY_S = 5.0
STREAMS = ASKED_MEANWHILE = 4


@contextlib.contextmanager
def silent(wires: list[Wire], partition: AbstractContextManager[None]) -> Iterator[None]:
    """Inside ``partition``, which cuts these."""
    with partition:
        before = [wire.carried_bytes for wire in wires]
        yield
        assert [wire.carried_bytes for wire in wires] == before, "something passed"


@contextlib.contextmanager
def still(probe: Breakable, name: str) -> Iterator[None]:
    """``name`` stands still inside the block."""
    with probe.stopped(name):
        yield
        assert psutil.Process(probe.cluster.pid(name)).status() == psutil.STATUS_STOPPED


Partition = Callable[[Breakable], AbstractContextManager[None]]
PARTITIONS: dict[str, Partition] = {
    "router and decode worker": lambda probe: silent(
        probe.wires.router_and_decode, probe.wires.between_router_and_decode()
    ),
    "store of P and store of D": lambda probe: silent(probe.wires.stores, probe.wires.between_stores()),
    "decode workers and their store": lambda probe: still(probe, "store-1"),
}
"""The last one stands still as a whole: the socket between the two cannot lose anything."""


@pytest.mark.parametrize("parties", PARTITIONS)
async def test_a_partition_of_five_seconds_costs_only_time(
    probe: Breakable, tiny_baseline: Baseline, parties: str
) -> None:
    seed = 100 + 10 * list(PARTITIONS).index(parties)
    meanwhile = bodies(seed + 1, ASKED_MEANWHILE)
    await at_most(4, (partial(tiny_baseline.ask, "/v1/completions", body) for body in meanwhile))
    carried = carried_bytes(probe)
    before = processes(probe.cluster)
    requests: list[asyncio.Task[None]] = []

    async def part() -> str:
        requests.append(asyncio.create_task(equal_baseline(probe, tiny_baseline, meanwhile)))
        with PARTITIONS[parties](probe):
            await asyncio.sleep(AWAY_S)
        return parties

    await streams_through(probe, tiny_baseline, bodies(seed, STREAMS), part)
    await asyncio.gather(*requests)
    assert processes(probe.cluster) == before, "no process ended, and none was started"
    for worker in probe.cluster.workers:
        await probe.until_ready(worker.name)
    await whole_again(probe, seed + 2)
    assert all(now > before for now, before in zip(carried_bytes(probe), carried, strict=True)), "the wires are in use"
    await probe.assert_at_rest()


def carried_bytes(probe: Breakable) -> list[int]:
    return [wire.carried_bytes for wire in [*probe.wires.router_and_decode, *probe.wires.stores]]


@pytest.mark.parametrize("parties", PARTITIONS)
async def test_the_only_request_outlives_a_partition_that_was_there_before_it(
    probe: Breakable, tiny_baseline: Baseline, parties: str
) -> None:
    """On an idle system nothing else wakes whoever waits."""
    body = tiny.completion(tiny.ids(random.Random(parties), 150), 20)
    right = await tiny_baseline.ask("/v1/completions", body)
    with PARTITIONS[parties](probe):
        asking = asyncio.create_task(read(probe, body, Answer()))
        await asyncio.sleep(AWAY_S)
    (await asking).assert_whole(right)
    await probe.until_ready(probe.wires.cut_off)
    await whole_again(probe, seed=600 + list(PARTITIONS).index(parties))
    await probe.assert_at_rest()
