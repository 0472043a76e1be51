"""Draining mock workers under load, over the control port: nobody's request fails."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.channel import Listener, bind_tcp, connect
from kvrelay.cli.draining import Routers
from kvrelay.config import Config, RouterConfig
from kvrelay.deploy.key import write_secret
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.errors import Lost, Malformed, Refused
from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.breaker import FAILURES_TO_OPEN
from kvrelay.protocol.feed import PagesWanted
from kvrelay.protocol.operator import AskRemaining, Remaining
from kvrelay.router.operator import OperatorServer
from tests.deploy.mock.test_mock_cluster import CONFIG, DECODES, PREFILLS, Mocks, idle, mocked, prompt
from tests.held_port import held_port
from tests.patience import PATIENCE_S, until
from tests.router.cluster import KEY, Cluster

CLIENTS = 6
TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@asynccontextmanager
async def emptied(tiny: Path, config: Config = CONFIG) -> AsyncIterator[Mocks]:
    """Mocks that are well again and hold nothing at the end."""
    async with mocked(tiny, RouterConfig(port=0, control_port=0, local_prefill="never"), config) as mocks:
        yield mocks
        mocks.suffer(*mocks.node.workers)
        await mocks.cluster.at_rest()
        await until(lambda: all(idle(worker) for worker in mocks.node.workers.values()))


@pytest.fixture
async def mocks(tiny: Path) -> AsyncIterator[Mocks]:
    async with emptied(tiny) as mocks:
        yield mocks


@pytest.fixture
async def unhurried(tiny: Path) -> AsyncIterator[Mocks]:
    """Their device computes so slowly that to load pages is always cheaper."""
    slow = msgspec.structs.replace(CONFIG.mock, time_scale=6.0)
    async with emptied(tiny, msgspec.structs.replace(CONFIG, mock=slow)) as mocks:
        yield mocks


async def drained(mocks: Mocks, name: str) -> None:
    """``name`` is drained, and found empty."""
    async with Routers([mocks.cluster.control], KEY) as routers:
        said = await routers.drain(name)
        async with asyncio.timeout(PATIENCE_S):
            while not said.is_empty:
                await asyncio.sleep(0.02)
                said = await routers.remaining(name)
    worker = mocks.worker(name)
    assert worker.life is not None
    assert idle(worker), "whoever is called empty does nothing"


@contextmanager
def load(mocks: Mocks) -> Iterator[list[int]]:
    """Clients that ask again and again, half of them for streams; the list grows by one for each right answer."""
    right: list[int] = []

    async def client(number: int) -> None:
        while True:
            asked = prompt(len(right) % 400)
            if number % 2:
                tokens, last = await mocks.stream(asked, TOKENS)
                assert (tokens, last) == (mocks.answer(asked, TOKENS), b"data: [DONE]")
            else:
                await mocks.ask(asked, TOKENS)
            right.append(number)

    clients = [asyncio.ensure_future(client(number)) for number in range(CLIENTS)]
    try:
        yield right
        failed = [each.exception() for each in clients if each.done()]
        assert failed == []
    finally:
        for each in clients:
            each.cancel()


@pytest.mark.slow
async def test_every_worker_is_restarted_in_turn_and_no_request_fails(mocks: Mocks) -> None:
    mocks.suffer(*mocks.node.workers, slow=8.0)
    with load(mocks) as right:
        for name in (*PREFILLS, *DECODES):
            before = len(right)
            await until(lambda before=before: len(right) > before + CLIENTS)  # type: ignore[misc]
            old = mocks.worker(name).life
            await drained(mocks, name)
            mocks.suffer(name, dead=True)
            await until(lambda name=name: mocks.worker(name).life is None)  # type: ignore[misc]
            mocks.suffer(name, slow=8.0)
            await until(lambda name=name: mocks.cluster.is_ready(name))  # type: ignore[misc]
            assert mocks.worker(name).life is not old
        before = len(right)
        await until(lambda: len(right) > before + CLIENTS)
    members = mocks.cluster.router.brain.fleet.workers
    assert not any(member.draining for member in members), "a worker that is born anew gets work"


async def test_what_a_draining_worker_has_left_is_counted_until_it_is_done(mocks: Mocks) -> None:
    mocks.suffer(*DECODES, slow=20.0)
    stream = asyncio.create_task(mocks.stream(prompt(0), 300))
    busy = [mocks.worker(name) for name in DECODES]
    await until(lambda: any(worker.life and worker.life.engine.scheduler.totals.written for worker in busy))
    (name,) = [worker.name for worker in busy if worker.life and worker.life.engine.scheduler.totals.written]
    async with Routers([mocks.cluster.control], KEY) as routers:
        said = await routers.drain(name)
        assert (str(said), said.is_empty) == (f"{name} has 1 answer left", False)
        for number in range(1, 4):
            assert (await mocks.ask(prompt(number)))["decode_worker"] != name
        mocks.suffer(*DECODES)
        tokens, _ = await stream
        assert tokens == mocks.answer(prompt(0), 300)
        assert (await routers.remaining(name)).is_empty
        await routers.drain(name, undo=True)
    assert {(await mocks.ask(prompt(number)))["decode_worker"] for number in range(4, 12)} == set(DECODES)


@pytest.mark.slow
async def test_streams_go_on_elsewhere_without_much_to_compute_when_the_deadline_is_over(
    unhurried: Mocks, tmp_path: Path
) -> None:
    write_secret(tmp_path / "key", KEY.decode())
    streams = [asyncio.create_task(unhurried.stream(prompt(number), 150)) for number in range(4)]
    brain = unhurried.cluster.router.brain
    await until(lambda: min(_written(unhurried)) > 8)
    status, said = await _command(unhurried, tmp_path, "decode-0", "--deadline-s", "0")
    assert (status, said.splitlines()[-1]) == (0, "decode-0 is empty: it can be stopped.")
    assert brain.loads.sequences["decode-0"] == 0
    assert idle(unhurried.worker("decode-0"))
    for number, stream in enumerate(streams):
        assert await stream == (unhurried.answer(prompt(number), 150), b"data: [DONE]")
    moved = [resumption for timeline in _timelines(unhurried) for resumption in timeline.resumptions]
    assert {(each.reason, each.lost_worker, each.worker) for each in moved} == {("drained", "decode-0", "decode-1")}
    assert min(each.cached_tokens for each in moved) >= 640, "on so slow a device pages are loaded"


def _written(mocks: Mocks) -> list[int]:
    """Tokens that each decode worker wrote."""
    lives = [mocks.worker(name).life for name in DECODES]
    return [life.engine.scheduler.totals.written if life else 0 for life in lives]


def _timelines(mocks: Mocks) -> list[Timeline]:
    return list(mocks.cluster.router.brain.ledger._timelines.values())


async def test_an_answer_that_cannot_go_on_elsewhere_is_left_where_it_is(mocks: Mocks) -> None:
    mocks.suffer(*DECODES, slow=40.0)
    body: dict[str, Any] = {"prompt": prompt(0), "max_tokens": 100, "ignore_eos": True, "presence_penalty": 0.5}
    stream = asyncio.create_task(mocks.cluster.stream(**body))
    await until(lambda: max(_written(mocks)) > 8)
    (name,) = [name for name in DECODES if mocks.cluster.router.brain.loads.sequences[name]]
    async with Routers([mocks.cluster.control], KEY) as routers:
        await routers.drain(name)
        assert not (await routers.hand_over(name)).is_empty
    mocks.suffer(*DECODES)
    assert (await stream)[-1] == b"data: [DONE]"
    assert not any(timeline.resumptions for timeline in _timelines(mocks))


async def test_a_router_that_is_started_again_is_told_of_the_drain(mocks: Mocks) -> None:
    """Its control port goes away in the middle, and what comes back knows neither the drain nor, at first, anybody."""
    brain = mocks.cluster.router.brain
    with held_port() as port:
        serving = asyncio.create_task(_operators(mocks, bind_tcp("127.0.0.1", port)))
        async with Routers([f"127.0.0.1:{port}"], KEY) as routers:
            assert (await routers.drain("prefill-0")).is_draining
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            brain.drains.undo("prefill-0")
            asking = asyncio.create_task(routers.remaining("prefill-0"))
            serving = asyncio.create_task(_operators(mocks, bind_tcp("127.0.0.1", port)))
            assert (await asking).is_draining
        serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_router_that_was_away_when_a_worker_was_drained_gives_it_no_work(tiny: Path) -> None:
    away = RouterConfig(port=0, control_port=free_port("127.0.0.1"))
    address = f"127.0.0.1:{away.control_port}"
    async with mocked(tiny, RouterConfig(port=0, control_port=0), more_routers=(address,)) as mocks:
        async with Routers([mocks.cluster.control], KEY) as routers:
            await routers.drain("decode-0")
        async with Cluster(tiny, router_config=away) as other:
            await until(lambda: other.drains("decode-0") and other.is_ready("decode-1"))
            async with Routers([address], KEY) as routers:
                await routers.drain("decode-0", undo=True)
            await until(lambda: mocks.cluster.is_ready("decode-0"))


async def test_what_one_router_refuses_no_router_does(tiny: Path) -> None:
    """The second one alone has seen the other worker fail."""
    second = RouterConfig(port=0, control_port=free_port("127.0.0.1"))
    address = f"127.0.0.1:{second.control_port}"
    async with (
        mocked(tiny, RouterConfig(port=0, control_port=0), more_routers=(address,)) as mocks,
        Cluster(tiny, router_config=second) as other,
        Routers([mocks.cluster.control, address], KEY) as routers,
    ):
        await until(lambda: all(other.is_ready(name) for name in DECODES))
        for _ in range(FAILURES_TO_OPEN):
            other.router.brain.outcomes.breakers.failed("decode-1", "x", time.monotonic())
        with pytest.raises(Refused, match="decode-1 fails, its circuit breaker is open"):
            await routers.drain("decode-0")
        assert not mocks.cluster.drains("decode-0")
        assert (await routers.drain("decode-0", force=True)).is_draining


async def _operators(mocks: Mocks, sock: object) -> None:
    server = OperatorServer(mocks.cluster.router.brain, time.monotonic, lambda commands: None)
    listener = Listener(sock, KEY, receiver="router", purposes={"operator"}, serve=server.serve)  # type: ignore[arg-type]
    await listener.run()


async def test_an_operator_needs_the_key_and_asks_for_what_there_is(mocks: Mocks) -> None:
    with pytest.raises(Refused, match="key"):
        await connect(mocks.cluster.control, b"x" * 32, sender="o", purpose="operator")
    link = await connect(mocks.cluster.control, KEY, sender="o", purpose="operator")
    await link.send(AskRemaining(worker="prefill-0"))
    assert isinstance(await link.recv(), Remaining)
    await link.send(PagesWanted(after=1))
    with pytest.raises((Lost, Malformed)):
        await link.recv()
    link.close()


@pytest.mark.slow
async def test_the_command_says_when_a_worker_is_empty_and_gives_it_work_again(mocks: Mocks, tmp_path: Path) -> None:
    write_secret(tmp_path / "key", KEY.decode())
    assert await _command(mocks, tmp_path, "decode-0") == (0, "decode-0 is empty: it can be stopped.\n")
    assert not mocks.cluster.is_ready("decode-0")
    async with mocks.cluster.http.get("/health") as response:
        health = await response.json()
    assert [each["name"] for each in health["workers"] if each["draining"]] == ["decode-0"]
    assert await mocks.cluster.metric('kvrelay_worker_draining{role="decode",worker="decode-0"}') == 1
    status, said = await _command(mocks, tmp_path, "decode-1")
    assert (status, "start another one first" in said) == (1, True)
    assert await _command(mocks, tmp_path, "decode-0", "--undo") == (0, "decode-0 gets work again.\n")
    assert mocks.cluster.is_ready("decode-0")
    mocks.suffer("decode-0", slow=1e5)
    mocks.suffer("decode-1", status=500)
    stuck = asyncio.create_task(mocks.cluster.complete(prompt=prompt(0)))
    await until(lambda: mocks.cluster.router.brain.loads.sequences["decode-0"] > 0)
    mocks.suffer("decode-1")
    status, said = await _command(mocks, tmp_path, "decode-0", "--deadline-s", "0.3")
    assert (status, "decode-0 has 1 answer left that cannot move" in said) == (1, True)
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)


async def _command(mocks: Mocks, folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of ``kvrelay drain``."""
    more = ("--key-file", str(folder / "key"), "--router", mocks.cluster.control)
    command = (sys.executable, "-m", "kvrelay", "drain", *arguments, *more)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return await process.wait(), output.decode()
