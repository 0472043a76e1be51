"""The death of a worker with many streams does not become a storm: prompts are computed again in turn, the urgent ones
first."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.fleet.index import store_key
from tests.deploy.mock.test_mock_cluster import PREFILLS, PROMPT, Mocks, mocked
from tests.patience import until

STREAMS = 16
PROMPT_TOKENS, ANSWER_TOKENS = 1200, 90
CONFIG = Config(
    mock=MockConfig(time_scale=6.0, kv_tokens=1 << 16),
    worker=WorkerConfig(load_wait_s=0.3, max_batched_tokens=2048, shared_chunk_tokens=0),
    cluster=ClusterConfig(stores=2, heartbeat_s=0.1),
)


def prompt(number: int) -> list[int]:
    """Prompts without a page in common."""
    return [20 + number, *((7 * at + at // 11) % 450 + 20 for at in range(PROMPT_TOKENS)), *PROMPT]


@dataclass
class Reader:
    """One client."""

    number: int
    priority: int
    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def back_s(self) -> float:
        """When its longest pause was over."""
        gaps = [after - before for before, after in itertools.pairwise(self.came_s)]
        return self.came_s[gaps.index(max(gaps)) + 1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@pytest.fixture
async def mocks(tiny: Path) -> AsyncIterator[Mocks]:
    async with mocked(tiny, RouterConfig(port=0, control_port=0), CONFIG) as mocks:
        yield mocks


async def read(mocks: Mocks, reader: Reader) -> None:
    """A stream to its end."""
    body = {"model": "tiny", "prompt": prompt(reader.number), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    headers = {"x-kvrelay-priority": str(reader.priority)}
    async with mocks.cluster.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            reader.done = reader.done or data == b"[DONE]"
            if data.startswith(b"{"):
                _take(msgspec.json.decode(data), reader)


def _take(event: dict[str, Any], reader: Reader) -> None:
    assert "error" not in event, event
    for choice in event["choices"]:
        reader.tokens += choice.get("token_ids") or []
        reader.came_s.append(time.monotonic())


async def forget_pages(mocks: Mocks) -> None:
    """What is lost with a worker now has to be computed: its pages are nowhere else."""
    for name in ("store-0", "store-1"):
        mocks.node.site.members[name].suffer(Faults(dead=True))
    mocks.suffer(*PREFILLS, dead=True)  # their engines have the prompts, too
    index = mocks.cluster.router.brain.index
    await until(lambda: not any(mocks.cluster.is_ready(name) for name in PREFILLS))
    await until(lambda: not any(index.count(store_key(name)) for name in ("store-0", "store-1")))
    mocks.suffer(*PREFILLS)
    await until(lambda: all(mocks.cluster.is_ready(name) for name in PREFILLS))


@pytest.mark.slow
async def test_many_streams_of_a_worker_that_dies_are_computed_again_in_turn(mocks: Mocks) -> None:
    recovery = mocks.cluster.router.brain.recovery
    mocks.suffer("decode-1", dead=True)
    await until(lambda: not mocks.cluster.is_ready("decode-1"))
    readers = [Reader(number, -5 if number % 2 else 0) for number in range(STREAMS)]
    reading = [asyncio.create_task(read(mocks, reader)) for reader in readers]
    await until(lambda: all(reader.tokens for reader in readers), within_s=30)
    mocks.suffer("decode-1")
    await until(lambda: mocks.cluster.is_ready("decode-1"))

    await forget_pages(mocks)
    assert not any(reader.done for reader in readers), "all are underway"
    mocks.suffer("decode-0", dead=True)
    await until(lambda: len(recovery) > 0)
    most_waiting = len(recovery)

    newcomer = Reader(90, 0)
    await read(mocks, newcomer)
    await asyncio.gather(*reading)
    for reader in (*readers, newcomer):
        assert reader.done
        assert reader.tokens == mocks.answer(prompt(reader.number), ANSWER_TOKENS), f"stream {reader.number}"
    assert most_waiting >= STREAMS // 4, "most had to wait for their turn"
    order = sorted(readers, key=lambda reader: reader.back_s)
    assert {reader.priority for reader in order[-3:]} == {-5}, "of those that waited the urgent ones went first"
    assert len(recovery) == 0
