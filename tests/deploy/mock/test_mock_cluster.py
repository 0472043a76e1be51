"""A router and 2x2 mock workers on real sockets: right answers over every path, and through every fault."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.mock.faults import Faults, Params
from kvrelay.deploy.mock.node import MockNode
from kvrelay.deploy.mock.roster import WorkerPlan, mock_names
from kvrelay.deploy.mock.site import Site
from kvrelay.deploy.mock.worker import MockWorker
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.fleet.index import store_key
from kvrelay.protocol.engine import engine_key
from kvrelay.types import Medium, Role
from tests.patience import until
from tests.router.cluster import KEY, Cluster

CONFIG = Config(
    mock=MockConfig(time_scale=0.05, kv_tokens=8192),
    worker=WorkerConfig(load_wait_s=3.0),
    cluster=ClusterConfig(stores=2, heartbeat_s=0.1),
)
PROMPT = [(7 * at + at // 11) % 450 + 20 for at in range(700)]
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@dataclass
class Mocks:
    """The router's side and the workers'."""

    cluster: Cluster
    node: MockNode

    def worker(self, name: str) -> MockWorker:
        return self.node.workers[name]

    def suffer(self, *names: str, **faults: Any) -> None:
        for name in names:
            self.worker(name).suffer(Faults(**faults))

    async def ready(self) -> None:
        await until(lambda: all(self.cluster.is_ready(name) for name in self.node.workers))

    def answer(self, prompt: list[int], count: int) -> list[int]:
        return self.node.site.author.answer(prompt, count)

    async def ask(self, prompt: list[int], count: int = 6) -> dict[str, Any]:
        """An answer, which is the right one. Its timeline."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
        status, answer, headers = await self.cluster.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == self.answer(prompt, count)
        async with self.cluster.http.get(f"/kvrelay/requests/{headers['x-request-id']}") as response:
            timeline: dict[str, Any] = await response.json()
        return timeline

    async def stream(self, prompt: list[int], count: int) -> tuple[list[int], bytes]:
        """The tokens of a streamed answer, and its last event."""
        more: dict[str, Any] = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
        events = await self.cluster.stream(**more)
        said = [json.loads(event.removeprefix(b"data: ")) for event in events if b'"token_ids"' in event]
        return [token for each in said for token in each["choices"][0]["token_ids"]], events[-1]


def prompt(number: int) -> list[int]:
    """Prompts without a page in common."""
    return [20 + number, *PROMPT]


@asynccontextmanager
async def mocked(
    folder: Path, router: RouterConfig, config: Config = CONFIG, more_routers: tuple[str, ...] = ()
) -> AsyncIterator[Mocks]:
    async with Cluster(folder, router_config=router) as cluster:
        names = mock_names(2, 2, 0, stores=2)
        routers = (cluster.control, *more_routers)
        site = Site(config, folder, cluster.tokens, stores=names.stores, routers=routers, key=KEY)
        node = MockNode(site, names.workers)
        ready = asyncio.Event()
        running = asyncio.create_task(node.run(lambda _: ready.set()))
        mocks = Mocks(cluster, node)
        try:
            await ready.wait()
            await mocks.ready()
            yield mocks
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def mocks(tiny: Path) -> AsyncIterator[Mocks]:
    """Gives everything back: nothing is reserved, and no block is in use."""
    async with mocked(tiny, RouterConfig(port=0, control_port=0, local_prefill="never")) as mocks:
        yield mocks
        await at_rest(mocks)


@pytest.fixture
async def hasty(tiny: Path) -> AsyncIterator[Mocks]:
    """Their router waits for prefill workers that say nothing less than half a second."""
    router = RouterConfig(port=0, control_port=0, transfer_wait_s=0.4, local_prefill="never")
    async with mocked(tiny, router) as mocks:
        yield mocks
        await at_rest(mocks)


async def at_rest(mocks: Mocks) -> None:
    """Nothing is reserved, and no block is in use."""
    mocks.suffer(*mocks.node.workers)
    await mocks.cluster.at_rest()
    await until(lambda: all(idle(worker) for worker in mocks.node.workers.values()))


def idle(worker: MockWorker) -> bool:
    if worker.life is None:
        return True
    scheduler = worker.life.engine.scheduler
    scheduler.cache.check_invariants()
    return scheduler.running == scheduler.waiting == scheduler.cache.used_blocks == 0


# ---------------------------------------------------------------- well


async def test_answers_over_two_workers_are_right_and_the_handoff_is_reported(mocks: Mocks) -> None:
    timeline = await mocks.ask(PROMPT)
    assert timeline["path"] == "remote_prefill"
    assert timeline["transfers"][0]["outcome"] == "arrived"
    assert timeline["transfers"][0]["pages"] == 22
    assert {"prefill_started", "last_chunk", "arrived", "loaded"} <= timeline["events"].keys()
    tokens, last = await mocks.stream(prompt(1), 9)
    assert tokens == mocks.answer(prompt(1), 9)
    assert last == b"data: [DONE]"
    again = await mocks.ask(PROMPT)
    assert again["cached_tokens"] >= 640


async def test_what_workers_hold_is_what_the_router_knows(mocks: Mocks) -> None:
    for number in range(3):
        await mocks.ask(prompt(number))
    index = mocks.cluster.router.brain.index
    await until(lambda: sum(index.count(name) for name in PREFILLS) == 3 * 21)
    await until(lambda: sum(index.count(name) for name in DECODES) == 3 * 22)
    await until(lambda: index.count(store_key("store-1")) >= 3 * 22)
    assert await mocks.cluster.metric('kvrelay_store_pages{store="store-1"}') >= 3 * 22


async def test_how_fast_pages_come_from_a_store_is_learned_from_what_it_counts(mocks: Mocks) -> None:
    for number in range(3):
        await mocks.ask(prompt(number))
    links, law = mocks.cluster.router.brain.loads.links, mocks.node.site.load_law
    await until(lambda: links.move("store-1", "store-1").per_byte.seen)
    s_per_byte = links.move("store-1", "store-1").s_per_byte
    assert s_per_byte == pytest.approx(1 / law.bytes_per_s, rel=0.05)
    (row,) = links.rows(["store-1"])
    assert links.tables.s_per_byte[row][row] == s_per_byte, "choices reckon with it"


async def test_texts_and_chats_are_answered_as_their_tokens_are(mocks: Mocks) -> None:
    same = {"model": "tiny", "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    text = same | {"prompt": "Hello there, you. " * 20}
    status, answer, said = await mocks.cluster.post("/v1/completions", text)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["token_ids"] == mocks.answer(choice["prompt_token_ids"], 4)
    chat = same | {"messages": [{"role": "user", "content": "Hi"}]}
    status, answer, heard = await mocks.cluster.post("/v1/chat/completions", chat)
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] == mocks.answer(answer["prompt_token_ids"], 4)
    for headers in (said, heard):
        timeline = mocks.cluster.router.brain.ledger.get(headers["x-request-id"])
        assert timeline is not None
        assert timeline.path == "remote_prefill", "the router rendered it, since it found that mocks render alike"


async def test_a_prompt_beyond_the_context_is_the_clients_fault(mocks: Mocks) -> None:
    status, answer, _ = await mocks.cluster.post("/v1/completions", {"model": "tiny", "prompt": [5] * 9000})
    assert status == 400
    assert "maximum context length is 8192" in answer["error"]["message"]


async def test_an_engine_answers_holders_of_the_engine_key_alone(mocks: Mocks) -> None:
    url, body = mocks.worker("decode-0").url, {"model": "tiny", "prompt": [5], "max_tokens": 1}
    keyed = {"authorization": f"Bearer {engine_key(KEY)}"}
    async with aiohttp.ClientSession() as http:
        for headers, status in (({}, 401), ({"authorization": "Bearer x"}, 401), (keyed, 200)):
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == status
        async with http.get(f"{url}/metrics") as response:
            assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in await response.text()


async def test_whoever_hangs_up_on_an_engine_leaves_nothing_in_its_log(
    mocks: Mocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, streams = web.StreamResponse.write, []

    async def to_nobody(self: web.StreamResponse, data: bytes) -> None:
        assert self._req is not None
        if self.headers.get("server") != "kvrelay" and self._req.transport is not None:
            streams.append(self)
            self._req.transport.close()
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", to_nobody)
    keyed, body = {"authorization": f"Bearer {engine_key(KEY)}"}, {"prompt": [5], "max_tokens": 3, "stream": True}
    async with aiohttp.ClientSession(mocks.worker("decode-0").url) as http:
        with pytest.raises(aiohttp.ClientError):
            async with http.post("/v1/completions", json=body, headers=keyed) as response:
                await response.read()
    assert len(streams) == 1
    assert "Traceback" not in caplog.text


# ---------------------------------------------------------------- faults


async def test_when_prefill_workers_hang_decode_workers_compute_prompts_themselves(hasty: Mocks) -> None:
    mocks = hasty
    mocks.suffer(*PREFILLS, hang=True)
    timeline = await mocks.ask(PROMPT)
    assert "prefill_finished" not in timeline["events"]
    mocks.suffer(*PREFILLS)
    await mocks.cluster.at_rest()
    mocks.cluster.router.brain._transfer_wait_s = 60.0
    assert "loaded" in (await mocks.ask(prompt(1)))["events"]


@pytest.mark.slow
async def test_a_dead_worker_is_done_without_and_taken_back_when_it_is_born_anew(mocks: Mocks) -> None:
    await mocks.ask(PROMPT)
    old = mocks.worker("prefill-0").life
    mocks.suffer("prefill-0", dead=True)
    for number in range(3):
        assert (await mocks.ask(prompt(number)))["prefill_worker"] == "prefill-1"
    await until(lambda: not mocks.cluster.is_ready("prefill-0"))
    await until(lambda: mocks.cluster.router.brain.index.count("prefill-0") == 0)
    mocks.suffer("prefill-0")
    await until(lambda: mocks.cluster.is_ready("prefill-0"))
    assert old is not None
    assert mocks.worker("prefill-0").life is not None
    assert mocks.worker("prefill-0").life.info.incarnation != old.info.incarnation  # type: ignore[union-attr]
    assert await mocks.cluster.metric("kvrelay_registrations_refused_total") == 0


@pytest.mark.slow
async def test_empty_workers_that_were_born_anew_do_not_draw_all_requests(mocks: Mocks) -> None:
    for number in range(6):
        await mocks.ask(prompt(number))
    reborn = ("prefill-0", "decode-0")
    mocks.suffer(*reborn, dead=True)
    await until(lambda: not any(mocks.cluster.is_ready(name) for name in reborn))
    mocks.suffer(*reborn)
    await until(lambda: all(mocks.cluster.is_ready(name) for name in reborn))
    timelines = await asyncio.gather(*(mocks.ask(prompt(100 + number)) for number in range(16)))
    for role in ("prefill_worker", "decode_worker"):
        asked = Counter(timeline[role] for timeline in timelines)
        assert max(asked.values()) <= 12, asked


async def test_a_worker_that_is_dead_from_the_start_refuses_connections_until_it_is_born(mocks: Mocks) -> None:
    stillborn = MockWorker(WorkerPlan(name="late", role=Role.BOTH, faults=Faults(dead=True)), mocks.node.site)
    running = asyncio.create_task(stillborn.run())
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{stillborn.url}/health")
        stillborn.suffer(Faults())
        await until(lambda: mocks.cluster.is_ready("late"))
        async with http.get(f"{stillborn.url}/health") as response:
            assert response.status == 200
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_streams_of_a_decode_worker_that_dies_go_on_from_another_one(mocks: Mocks) -> None:
    mocks.suffer(*DECODES, slow=20.0)
    streams = [asyncio.create_task(mocks.stream(prompt(number), 100)) for number in range(2)]
    busy = [mocks.worker(name) for name in DECODES]
    await until(lambda: all(worker.life and worker.life.engine.scheduler.totals.written for worker in busy))
    mocks.suffer("decode-0", dead=True)
    mocks.suffer("decode-1")
    ended = [await stream for stream in streams]
    assert ended == [(mocks.answer(prompt(number), 100), b"data: [DONE]") for number in range(2)]
    assert await mocks.cluster.metric('kvrelay_resumes_total{outcome="resumed",reason="reset"}') == 1


async def test_streams_of_a_decode_worker_that_hangs_and_answers_health_checks_go_on_from_another(mocks: Mocks) -> None:
    mocks.suffer(*DECODES, slow=20.0)
    streams = [asyncio.create_task(mocks.stream(prompt(number), 100)) for number in range(2)]
    busy = [mocks.worker(name) for name in DECODES]
    await until(lambda: all(worker.life and worker.life.engine.scheduler.totals.written for worker in busy))
    mocks.suffer("decode-0", hang=True)
    mocks.suffer("decode-1")
    assert [await stream for stream in streams] == [(mocks.answer(prompt(n), 100), b"data: [DONE]") for n in range(2)]
    assert not mocks.cluster.is_ready("decode-0")
    mocks.suffer("decode-0")
    await until(lambda: mocks.cluster.is_ready("decode-0"))


async def test_while_one_worker_is_slow_others_do_its_work(mocks: Mocks) -> None:
    mocks.suffer(*PREFILLS, slow=1e5)
    stuck = asyncio.create_task(mocks.ask(PROMPT))
    running = [mocks.worker(name) for name in PREFILLS]
    await until(lambda: any(worker.life and worker.life.engine.scheduler.running for worker in running))
    (well,) = [worker.name for worker in running if worker.life and not worker.life.engine.scheduler.running]
    mocks.suffer(well)
    for number in range(3):
        assert (await mocks.ask(prompt(number)))["prefill_worker"] == well
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)


async def test_a_worker_that_answers_500_is_passed_by(mocks: Mocks) -> None:
    mocks.suffer("prefill-0", "decode-0", status=500)
    for number in range(4):
        timeline = await mocks.ask(prompt(number))
        assert (timeline["prefill_worker"], timeline["decode_worker"]) == ("prefill-1", "decode-1")
    mocks.suffer("decode-1", status=500)
    status, _, _ = await mocks.cluster.post("/v1/completions", {"model": "tiny", "prompt": PROMPT})
    assert status == 503


async def test_an_answer_that_breaks_off_is_written_on_elsewhere(mocks: Mocks) -> None:
    mocks.suffer(*DECODES, drop_after=3)
    assert await mocks.stream(PROMPT, 9) == (mocks.answer(PROMPT, 9), b"data: [DONE]")
    assert await mocks.cluster.metric('kvrelay_resumes_total{outcome="resumed",reason="reset"}') == 2
    mocks.suffer("decode-1")
    for number in range(2):
        assert (await mocks.ask(prompt(number), 9))["decode_worker"] == "decode-1"


async def test_lost_events_are_noticed_and_asked_for_again(mocks: Mocks) -> None:
    await mocks.ask(prompt(0))
    brain = mocks.cluster.router.brain
    await until(lambda: sum(map(brain.index.count, PREFILLS)) == 21)
    mocks.suffer(*mocks.node.workers, lose_events=1)
    for number in range(1, 9):
        await mocks.ask(prompt(number))
        await asyncio.sleep(0.02)
    await until(lambda: brain.index.gaps > 0)
    assert await mocks.cluster.metric("kvrelay_index_gaps_total") > 0
    for worker in mocks.node.workers.values():
        held = worker.life.log.held(Medium.HBM) if worker.life else 0
        await until(lambda worker=worker, held=held: brain.index.count(worker.name) == held)  # type: ignore[misc]


async def test_stale_orders_are_of_no_use_and_do_no_harm(mocks: Mocks) -> None:
    await mocks.ask(prompt(0))
    mocks.suffer(*mocks.node.workers, params=Params.STALE)
    for number in range(1, 3):
        await mocks.ask(prompt(number))
    assert await mocks.cluster.metric("kvrelay_unknown_transfers_total") > 0


async def test_garbled_orders_are_counted_and_answers_are_right(mocks: Mocks) -> None:
    mocks.suffer(*mocks.node.workers, params=Params.GARBAGE)
    timeline = await mocks.ask(PROMPT)
    assert "loaded" not in timeline["events"]
    line = "kvrelay_worker_count"
    async with mocks.cluster.http.get("/metrics") as response:
        assert line in await response.text()
    await until(lambda: garbled(mocks) >= 2)


def garbled(mocks: Mocks) -> int:
    members = mocks.cluster.router.brain.fleet.workers
    return sum(member.counts.get("handoffs_malformed", 0) for member in members)


# ---------------------------------------------------------------- the control route


async def test_faults_are_given_over_loopback_to_who_shows_the_key(mocks: Mocks) -> None:
    keyed = {"authorization": f"Bearer {engine_key(KEY)}"}
    url = f"{mocks.node.control_url}/workers"
    async with aiohttp.ClientSession() as http:
        for headers, path, body, status in (
            ({}, "/decode-0/faults", b'{"hang":true}', 401),
            (keyed, "/nobody/faults", b"{}", 404),
            (keyed, "/decode-0/faults", b'{"hung":true}', 400),
            (keyed, "/decode-0/faults", b'{"hang":true}', 200),
        ):
            async with http.put(url + path, data=body, headers=headers) as response:
                assert response.status == status
        async with http.get(url, headers=keyed) as response:
            shown = {each["name"]: each["faults"]["hang"] for each in await response.json()}
    assert shown == {name: name == "decode-0" for name in (*mocks.node.workers, "store-0", "store-1")}
    assert mocks.node.control_url.startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_mock_workers_need_neither_vllm_nor_torch(tiny: Path) -> None:
    code = (
        "import sys, asyncio; from pathlib import Path\n"
        "sys.modules |= dict.fromkeys(['torch', 'vllm', 'zmq'])\n"
        "from kvrelay.config import Config\n"
        "from kvrelay.deploy.mock.node import NodePlan, run_node\n"
        "from kvrelay.deploy.mock.roster import mock_names\n"
        "names = mock_names(2, 1, 0, stores=1)\n"
        f"plan = NodePlan(model_path=Path({str(tiny)!r}), routers=(), workers=names.workers, stores=names.stores)\n"
        "async def main():\n"
        "    ready = asyncio.Event()\n"
        "    task = asyncio.create_task(run_node(Config(), plan, key=b'k' * 32, ready=lambda node: ready.set()))\n"
        "    waits = asyncio.create_task(ready.wait())\n"
        "    await asyncio.wait([task, waits], return_when=asyncio.FIRST_COMPLETED)\n"
        "    print('serving', waits.done())\n"
        "    task.cancel()\n"
        "    await asyncio.wait([task])\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout == "serving True\n", done.stderr
