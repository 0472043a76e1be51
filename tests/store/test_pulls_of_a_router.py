"""A router, real stores and workers that only pretend: a prefix of one node comes to the other before P is asked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.fleet.experience import Learned, kind_of
from kvrelay.identity import name_pages, root_name
from kvrelay.policy import patience
from kvrelay.protocol.engine import PrefillLeg
from kvrelay.store.client import StoreClient
from kvrelay.types import PageName, Role
from tests.fleet.known import PERF
from tests.fleet.values import engine, fingerprint
from tests.patience import PATIENCE_S, until
from tests.router.cluster import Cluster
from tests.router.tiny_tokenizer import make_tokenizer
from tests.store.conftest import StoreProcess, payload

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]
FORM = fingerprint().format
PREFIX = list(range(10, 410))
PROMPT = [*PREFIX, 7, 8, 9]
NAMES: list[PageName] = name_pages(root_name(fingerprint()), PREFIX, FORM.page_tokens)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Nodes:
    """P and D are on one node; the other has the prefix, and no worker."""

    def __init__(self, cluster: Cluster, start: Start, connect: Connect) -> None:
        self.cluster = cluster
        self.near, self.far = (start(name, 256, "", (cluster.control,)) for name in ("near", "far"))
        self.reader = connect(self.near, "w/1", format=FORM)
        writer = connect(self.far, "x/1", grant_slots=len(NAMES), format=FORM)
        for number, name in enumerate(NAMES):
            writer.put(name, payload(number, FORM.page_tokens, FORM), FORM.page_tokens)
        self.seen: list[list[bool]] = []
        """Which of the pages were near when P was asked."""

    async def ready(self) -> None:
        index, stores = self.cluster.router.brain.index, self.cluster.router.brain.fleet.stores
        prefill = await self.cluster.add("p1", Role.PREFILL, store_name="near")
        await self.cluster.add("d1", Role.DECODE, store_name="near")
        prefill.on_prefill = self._look
        await until(lambda: len(index.find(tuple(NAMES)).leading()) == 1 and len(stores) == 2)

    async def _look(self, _leg: PrefillLeg) -> None:
        self.seen.append(await asyncio.to_thread(self.reader.exists, NAMES))

    async def ask(self) -> dict[str, Any]:
        """The timeline of a request that was answered."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
        status, answer, headers = await self.cluster.post("/v1/completions", body)
        assert status == 200, answer
        async with self.cluster.http.get(f"/kvrelay/requests/{headers['x-request-id']}") as response:
            timeline: dict[str, Any] = await response.json()
        return timeline


@pytest.fixture
async def nodes(tokenizer: Path, start_store: Start, connect: Connect) -> AsyncIterator[Nodes]:
    async with Cluster(tokenizer, dead_after_s=10.0) as cluster:
        # Else the first prediction is that of a fast machine, on which nothing of this is worth a message.
        cluster.router.brain.experience.recall(Learned(kinds={kind_of(engine()): PERF}))
        made = await asyncio.to_thread(Nodes, cluster, start_store, connect)
        await made.ready()
        yield made
        await cluster.at_rest()


async def test_the_prefix_is_pulled_before_p_is_asked(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HELD_SLACK_S", PATIENCE_S)  # a busy machine moves pages slowly
    (wait,) = (await nodes.ask())["waits"]
    assert (wait["source"], wait["origin"], wait["tokens"], wait["ending"]) == ("peer", "far", 400, "came")
    assert nodes.seen == [[True] * len(NAMES)]
    for number in (0, 57, 99):
        assert await asyncio.to_thread(nodes.reader.get, NAMES[number]) == payload(number, FORM.page_tokens, FORM)
    assert await nodes.cluster.metric('kvrelay_pulls_total{ending="came"}') == 1
    assert await nodes.cluster.metric("kvrelay_pull_bytes_total") == len(NAMES) * FORM.page_bytes
    assert await nodes.cluster.metric('kvrelay_prefix_waits_total{ending="came",source="peer"}') == 1
    # The next one finds it there.
    assert "waits" not in await nodes.ask()


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "ending"), [(False, "late"), (True, "lost")])
async def test_a_store_that_does_not_push_costs_a_bounded_wait_and_no_answer(
    nodes: Nodes, dies: bool, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dies:  # its death is heard of long before it would be late
        monkeypatch.setattr(patience, "HELD_SLACK_S", PATIENCE_S)
    brain = nodes.cluster.router.brain
    nodes.far.signal(signal.SIGSTOP)
    asked = asyncio.create_task(nodes.ask())
    if dies:
        await until(lambda: len(brain.prefixes.pulls) == 1)
        nodes.far.signal(signal.SIGKILL)
    (wait,) = (await asked)["waits"]
    assert wait["ending"] == ending
    assert nodes.seen == [[False] * len(NAMES)]
    assert len(brain.prefixes.pulls) == len(brain.prefixes.holds) == 0
