"""The router as a process: its ports, and what happens when a part of it dies."""

from __future__ import annotations

import asyncio
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrelay import channel
from kvrelay.channel import bind_tcp
from kvrelay.config import Config, RouterConfig
from kvrelay.deploy.command import program_anywhere
from kvrelay.deploy.key import write_secret
from kvrelay.errors import Lost, Misconfigured, Refused
from kvrelay.fleet.drain_command import DrainCommand
from kvrelay.fleet.membership import Missing
from kvrelay.fleet.workers import NoHandoff
from kvrelay.protocol.engine import engine_key
from kvrelay.protocol.feed import Heartbeat, PagesWanted, RegisterStore, RegisterWorker
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.protocol.operator import AskRemaining, DrainWorker, Remaining
from kvrelay.router.extent import MAX_DIGITS
from kvrelay.router.runner import Router, run_router
from kvrelay.types import Role, WorkerInfo
from tests.fleet.values import store, worker
from tests.patience import PATIENCE_S, until
from tests.router.cluster import KEY, Cluster


@pytest.mark.parametrize("setting", ["port", "control_port"])
async def test_a_port_in_use_is_named_before_anything_starts(model_folder: Path, setting: str) -> None:
    taken = bind_tcp("127.0.0.1", 0)
    ports = {"port": 0, "control_port": 0, setting: taken.getsockname()[1]}
    with pytest.raises(Misconfigured, match=rf"router\.{setting}"):
        await run_router(Config(router=RouterConfig(**ports)), key=KEY, model_path=model_folder)
    taken.close()


@pytest.mark.slow
async def test_the_command_that_health_prints_gives_the_worker_work_again(model_folder: Path, tmp_path: Path) -> None:
    write_secret(tmp_path / "key", KEY.decode())
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        run_router(
            Config(router=RouterConfig(port=0, control_port=0)),
            key=KEY,
            model_path=model_folder,
            ready=lambda *where: ready.set_result(where),
            drain=DrainCommand(program=program_anywhere(), key_file=str(tmp_path / "key")),
        )
    )
    url, control = await ready
    member = await channel.connect(control, KEY, sender="d", purpose="feed")
    await member.send(RegisterWorker(worker=worker("d", Role.DECODE)))
    operator = await channel.connect(control, KEY, sender="x", purpose="operator")
    answer: Message = Rejected(code="", reason="")
    while not isinstance(answer, Remaining):  # until the worker is known
        await operator.send(DrainWorker(worker="d", force=True))
        answer = await operator.recv()
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
        why = (await response.json())["why"]
    command = await asyncio.create_subprocess_shell(why.partition("work again: ")[2], cwd="/", stdout=PIPE)
    said, _ = await command.communicate()
    assert said == b"d gets work again.\n"
    await operator.send(AskRemaining(worker="d"))
    assert not (await channel.expect(operator, Remaining)).draining
    operator.close()
    member.close()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_router_says_when_and_where_it_is_ready_and_reads_no_integer_without_end(model_folder: Path) -> None:
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    config = Config(router=RouterConfig(port=0, control_port=0))
    running = asyncio.create_task(
        run_router(config, key=KEY, model_path=model_folder, ready=lambda *where: ready.set_result(where))
    )
    url, control = await ready
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/health") as response:
            assert response.status == 503
        for digits, says in ((MAX_DIGITS, "no worker"), (MAX_DIGITS + 1, "out of range")):
            body = b'{"prompt":"x","seed":%s}' % (b"1" * digits)
            headers = {"content-type": "application/json"}
            async with http.post(f"{url}/v1/completions", data=body, headers=headers) as response:
                assert says in (await response.json())["error"]["message"]
    (await channel.connect(control, KEY, sender="x", purpose="feed")).close()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(Lost):
        await channel.connect(control, KEY, sender="x", purpose="feed")


async def test_a_background_task_that_dies_ends_the_router(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(now: float) -> None:
        raise RuntimeError("broken clock")

    other = Router(Config(), KEY, cluster.tokens)
    monkeypatch.setattr(other.brain, "tick", broken)
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await asyncio.wait_for(other.serve(bind_tcp("127.0.0.1", 0), bind_tcp("127.0.0.1", 0), None), PATIENCE_S)


async def test_only_links_that_hold_the_key_and_come_to_feed_are_heard(cluster: Cluster) -> None:
    with pytest.raises(Refused):
        await channel.connect(cluster.control, b"wrong" * 8, sender="x", purpose="feed")
    with pytest.raises(Refused, match="'peer'"):
        await channel.connect(cluster.control, KEY, sender="x", purpose="peer")
    assert await cluster.metric("kvrelay_links_refused_total") == 2


async def test_a_link_that_the_routers_own_error_ends_shows_in_the_metrics(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    assert await cluster.metric("kvrelay_links_crashed_total") == 0
    monkeypatch.setattr(cluster.router.brain.members, "register_store", broken)
    await cluster.dial(store())
    await until(lambda: "1 crashed" in repr(cluster.router._readings.listener))
    assert await cluster.metric("kvrelay_links_crashed_total") == 1


async def test_a_link_that_speaks_out_of_turn_or_for_another_is_cut(cluster: Cluster) -> None:
    beat = Heartbeat(name="d9", incarnation="i1", healthy=True)
    for messages in (
        [beat],
        [RegisterStore(store=store("s9")), beat],
        [RegisterWorker(worker=worker("d8", Role.DECODE)), RegisterWorker(worker=worker("d9", Role.DECODE))],
        [RegisterStore(store=store("d9")), RegisterWorker(worker=worker("d9", Role.DECODE))],
        [RegisterWorker(worker=worker("d9", Role.DECODE, url="http://127.0.0.1:1/secret"))],
        [RegisterWorker(worker=worker("d9", Role.DECODE, url="file:///etc"))],
    ):
        link = await channel.connect(cluster.control, KEY, sender="d9", purpose="feed")
        for message in messages:
            await link.send(message)
        with pytest.raises(Lost):
            await _until_cut(link)
        link.close()
    assert cluster.router.brain.fleet.workers.get("d9") is None


async def test_workers_are_shown_the_engine_key_and_never_what_the_client_showed(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    body = {"model": "tiny", "prompt": "Hello, you"}
    await cluster.post("/v1/completions", body, headers={"authorization": "Bearer of-the-client"})
    assert len(prefill.bodies()) == len(decode.bodies()) == 1
    assert prefill.authorizations == decode.authorizations == {f"Bearer {engine_key(KEY)}"}


async def test_a_worker_that_got_other_weights_is_no_longer_paired_with_those_of_before(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    fleet = cluster.router.brain.fleet
    old = cluster.members["p1"].info
    assert isinstance(old, WorkerInfo)
    fresh = msgspec.structs.replace(old.engine.fingerprint, weights_epoch=7)
    engine = msgspec.structs.replace(old.engine, fingerprint=fresh)
    await cluster.members["p1"].send(RegisterWorker(worker=msgspec.structs.replace(old, engine=engine)))
    await until(lambda: (member := fleet.workers.get("p1")) is not None and member.info.engine == engine)
    p, d = (member.info for member in (fleet.workers.get("p1"), fleet.workers.get("d1")) if member is not None)
    assert fleet.pair(p, d, time.monotonic()) == NoHandoff(reason="fingerprint.weights_epoch")
    await until(lambda: cluster.is_ready("p1"))
    await cluster.complete()
    assert prefill.bodies() == []
    assert len(decode.bodies()) == 1


async def test_connections_to_workers_are_used_again(cluster: Cluster) -> None:
    prefill, decode = await cluster.split()
    for _ in range(5):
        await cluster.complete()
        await cluster.stream()
    assert len(prefill.connections) <= 3
    assert len(decode.connections) <= 3


async def test_a_silent_worker_gets_no_work_until_it_is_heard_again(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    member = cluster.members["d1"]
    member.silent = True
    await until(lambda: not cluster.is_ready("d1"))
    status, _, _ = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert status == 503
    member.silent = False
    await until(lambda: cluster.is_ready("d1"))
    await cluster.complete()
    assert len(decode.bodies()) == 1


@pytest.mark.slow
async def test_who_could_not_be_heard_while_the_router_itself_stood_still_is_not_silent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, missed, ticks = cluster.router.brain.members, list[str](), list[float]()
    expire = members.expire

    def noted(now: float) -> Missing:
        missing = expire(now)
        missed.extend(missing.silent)
        ticks.append(now)
        return missing

    monkeypatch.setattr(members, "expire", noted)
    await cluster.split()
    time.sleep(cluster.dead_after_s + 0.5)  # this loop, and with it the router, stands still
    went_on_s = time.monotonic()
    await until(lambda: ticks and ticks[-1] > went_on_s)
    assert missed == []
    await cluster.complete()


async def _until_cut(link: channel.Channel) -> None:
    """Read what a router asks of everybody who registers, until it ends the link."""
    while isinstance(await link.recv(), PagesWanted):
        pass
