"""How fast pages go from store to store by each transport, beside NIXL alone with the same sizes.

Run:  python -m benchmarks.links            (an idle machine with two cores or more, or the figures mean little)

What is timed is a whole push: offer, answer, bytes, checksums, until the receiving store says that all is there. Beside
it stands what either store's process computed for it (which other work on the machine disturbs less), and for how long
the receiving store served nobody else: the longest single step of its event loop, in time of its processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.config_text import parse
from kvrelay.protocol.feed import Heartbeat, Neighbours, TransferEvent
from kvrelay.store.client import StoreClient
from kvrelay.store.daemon import run_store
from kvrelay.types import PageFormat, PageName, Stage, Transport

KEY = b"k" * 32
ROUNDS = 9
STREAMS = 4


class Load(NamedTuple):
    """Pages of one push."""

    what: str
    format: PageFormat
    pages: int

    @property
    def size_bytes(self) -> int:
        return self.pages * self.format.page_bytes


LOADS = (
    Load("64 MB", PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=32), 91),
    Load("1,024 x 16 KiB", PageFormat(layers=1, kv_heads=4, head_dim=64, dtype="bfloat16", page_tokens=16), 1024),
)
TRANSPORTS = (Transport.TCP, Transport.SHM, *([Transport.NIXL] if find_spec("nixl") else []))


class Ear:
    """A router that only listens, and tells the sending store where the other one is."""

    def __init__(self) -> None:
        self.arrived: dict[str, asyncio.Event] = {}
        self.ready = asyncio.Event()
        self.peers: list[str] = []

    async def serve(self, link: Channel) -> None:
        await link.send(Neighbours(addresses=self.peers))
        while True:
            match await link.recv():
                case TransferEvent(stage=Stage.ARRIVED) as event:
                    self.arrived[event.transfer].set()
                case TransferEvent(stage=Stage.FAILED) as event if not self.arrived[event.transfer].is_set():
                    raise SystemExit(f"{event.transfer} failed: {event.reason}")
                case Heartbeat(links=[way, *_]) if way.rank:
                    self.ready.set()


class Push(NamedTuple):
    """What one push took."""

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float
    longest_step_s: float


class Store(NamedTuple):
    """A store process that is measured."""

    address: str
    pid: int
    longest_step_s: Any
    """Shared memory: the longest step of its event loop since it was set to zero."""

    @property
    def cpu_s(self) -> float:
        """Processor time of all its threads; the clock of another process has this number on Linux."""
        return time.clock_gettime(~self.pid << 3 | 2)


def watch_steps(longest_s: Any) -> None:
    """Note in ``longest_s`` how long the event loop of this process stays in one callback."""
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        longest_s.value = max(longest_s.value, time.thread_time() - started)

    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]


def serve(toml: str, socket_path: Path, router: str, started: Connection, longest_s: Any) -> None:
    watch_steps(longest_s)
    work = run_store(
        parse(toml),
        name=socket_path.stem,
        socket_path=socket_path,
        key=KEY,
        routers=(router,),
        ready=lambda info: started.send(info.address),
    )
    asyncio.run(work)


@contextlib.asynccontextmanager
async def store(folder: Path, name: str, toml: str, router: str) -> AsyncIterator[Store]:
    """A store process."""
    ours, theirs = multiprocessing.Pipe()
    longest_s = multiprocessing.Value("d", 0.0, lock=False)
    process = multiprocessing.Process(target=serve, args=(toml, folder / name, router, theirs, longest_s), daemon=True)
    process.start()
    try:
        address: str = await asyncio.to_thread(ours.recv)
        assert process.pid is not None
        yield Store(address, process.pid, longest_s)
    finally:
        process.terminate()
        process.join()


def measured_s(transport: Transport, load: Load, streams: int = STREAMS) -> list[float]:
    """Seconds of each push."""
    return [push.seconds for push in asyncio.run(measure(transport, load, streams))]


async def measure(transport: Transport, load: Load, streams: int = STREAMS) -> list[Push]:
    """What each push took."""
    ear = Ear()
    sock = bind_tcp("127.0.0.1", 0)
    host, port = sock.getsockname()
    listener = asyncio.create_task(Listener(sock, KEY, receiver="ear", purposes={"feed"}, serve=ear.serve).run())
    settings = f"store.arena_bytes = {(ROUNDS + 1) * load.size_bytes}\nstore.streams = {streams}\n"
    router = f"{host}:{port}"
    with tempfile.TemporaryDirectory(prefix="kvrelay-") as name:
        folder = Path(name)
        async with store(folder, "far", settings, router) as far:
            ear.peers = [far.address]
            async with store(folder, "near", f'{settings}store.transports = ["{transport}"]', router) as near:
                await ear.ready.wait()
                pushes = await push_often(ear, folder / "near", load, near, far)
    listener.cancel()
    return pushes


async def push_often(ear: Ear, socket_path: Path, load: Load, near: Store, far: Store) -> list[Push]:
    client = StoreClient(socket_path, KEY, owner="bench/1", format=load.format)
    client.start()
    await asyncio.to_thread(client.wait_attached, 5)
    pushes: list[Push] = []
    for serial in range(ROUNDS):
        await asyncio.sleep(0.7)  # the stores map memory ahead of need meanwhile
        names = [PageName((serial * load.pages + number).to_bytes(16, "little")) for number in range(load.pages)]
        data = [np.random.default_rng(number).bytes(load.format.page_bytes) for number in range(load.pages)]
        pages = [(name, payload, load.format.page_tokens) for name, payload in zip(names, data, strict=True)]
        await asyncio.to_thread(client.put_many, pages)
        random.Random(serial).shuffle(names)
        transfer = f"t{serial}"
        arrived = ear.arrived[transfer] = asyncio.Event()
        far.longest_step_s.value = 0.0
        cpu_s, started = (near.cpu_s, far.cpu_s), time.perf_counter()
        client.open_transfer(transfer, names, load.pages * load.format.page_tokens, far.address)
        await arrived.wait()
        took_s = time.perf_counter() - started
        pushes.append(Push(took_s, near.cpu_s - cpu_s[0], far.cpu_s - cpu_s[1], far.longest_step_s.value))
    await asyncio.to_thread(client.close)
    return pushes


# ---------------------------------------------------------------- NIXL alone


def _agent_with(size: int) -> tuple[Any, Any]:
    from nixl._api import nixl_agent, nixl_agent_config

    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:] = 1
    agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    return agent, memory


def _receive(size: int, pipe: Connection) -> None:
    agent, memory = _agent_with(size)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0.001):
        agent.get_new_notifs()


def raw_nixl(load: Load) -> list[float]:
    """Seconds of one-sided writes of the same pieces from one process to another."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_receive, args=(load.size_bytes, theirs), daemon=True)
    process.start()
    agent, memory = _agent_with(load.size_bytes)
    metadata, base = ours.recv()
    peer = agent.add_remote_agent(metadata)
    step = load.format.page_bytes
    here, there = np.zeros((2, load.pages, 3), np.uint64)
    seconds: list[float] = []
    for serial in range(ROUNDS):
        order = np.random.default_rng(serial).permutation(load.pages)
        here[:, 0], there[:, 0] = memory.ctypes.data + order * step, base + order[::-1] * step
        here[:, 1] = there[:, 1] = step
        started = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), peer
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds.append(time.perf_counter() - started)
        agent.release_xfer_handle(handle)
    ours.send("end")
    process.join()
    return seconds


def show(what: str, load: Load, seconds: list[float]) -> None:
    median, best = load.size_bytes / statistics.median(seconds) / 1e9, load.size_bytes / min(seconds) / 1e9
    print(f"{load.what:>15}  {what:12} median {median:5.2f} GB/s, best {best:5.2f} GB/s", flush=True)


def show_cost(load: Load, pushes: list[Push]) -> None:
    _, sender, receiver, longest = (statistics.median(column) for column in zip(*pushes, strict=True))
    each, worst = 1e6 / load.pages, max(push.longest_step_s for push in pushes)
    print(f"{'':>17}per page: sender {sender * each:.1f} us, receiver {receiver * each:.1f} us of processor time")
    print(
        f"{'':>17}longest step of the receiver: median {longest * 1e3:.1f} ms, worst {worst * 1e3:.1f} ms", flush=True
    )


def main() -> None:
    for load in LOADS:
        for transport in TRANSPORTS:
            pushes = asyncio.run(measure(transport, load))
            show(transport, load, [push.seconds for push in pushes])
            show_cost(load, pushes)
        if Transport.NIXL in TRANSPORTS:
            show("NIXL alone", load, raw_nixl(load))


if __name__ == "__main__":
    main()
