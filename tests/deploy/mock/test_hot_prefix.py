"""Prompts with one long prefix that come at once, through a real router and simulated engines that share steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.policy import patience
from tests.deploy.mock.test_mock_cluster import PREFILLS, Mocks, mocked

CONFIG = Config(
    # A step takes a tenth of a second, so that a prefix is worth some messages.
    mock=MockConfig(time_scale=20.0, kv_tokens=1 << 16),
    worker=WorkerConfig(load_wait_s=3.0),
    cluster=ClusterConfig(stores=2, heartbeat_s=0.1),
)
PREFIX, OWN, COUNT = 960, 32, 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@pytest.fixture
async def mocks(tiny: Path) -> AsyncIterator[Mocks]:
    async with mocked(tiny, RouterConfig(port=0, control_port=0, local_prefill="never"), CONFIG) as mocks:
        yield mocks
        await mocks.cluster.at_rest()


def prompt(kind: int, own: int, prefix: int = PREFIX) -> list[int]:
    return [20 + kind] * prefix + [200 + own] * OWN


def computed(mocks: Mocks) -> int:
    """Tokens of prompts that prefill workers have computed."""
    lives = [mocks.worker(name).life for name in PREFILLS]
    return sum(life.engine.scheduler.totals.computed for life in lives if life is not None)


@pytest.mark.slow
async def test_of_many_that_come_at_once_one_computes_the_prefix(mocks: Mocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HELD_SLACK_S", 20.0)  # engines in real time may be late on a busy machine
    await asyncio.gather(*(mocks.ask(prompt(kind, 0, 64), 1) for kind in range(2)))  # their speed is learned
    await mocks.ask(prompt(3, 0, 512), 1)
    before = computed(mocks)
    timelines = await asyncio.gather(*(mocks.ask(prompt(9, own), 1) for own in range(COUNT)))
    endings = [wait["ending"] for timeline in timelines for wait in timeline.get("waits", [])]
    assert endings.count("came") >= COUNT - 2
    # One computes the prefix, or two when the first choice was made before anything was known.
    assert computed(mocks) - before <= 2 * PREFIX + COUNT * (OWN + 32)
