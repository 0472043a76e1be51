"""How fast pages go through a store: put, get, and push to another store over TCP, beside a plain copy.

Run:  python -m benchmarks.store [--no-peer]   (an idle machine with two cores or more, or the figures mean little)

Mooncake's Store puts, gets and is asked beside it, with as many pages of the same size and as many names.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import mmap
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers import mooncake
from kvrelay.config_text import parse
from kvrelay.store.bulk import NamedPayload
from kvrelay.store.client import StoreClient
from kvrelay.store.daemon import run_store
from kvrelay.store.inquiry import Inquiry
from kvrelay.types import PageFormat, PageName

FORMAT = PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=32)
PAGES = (64 << 20) // FORMAT.page_bytes
ROUNDS = 8
QUESTIONS = 20
EXISTS = ("exists", "exists_remote")
ASKED_NAMES = 200
"""All different: those of the last pages put, and of more before them."""
AFTER_PUT = "exists_after_put"
"""One question, right after a page was put: what the client posted with that has to be taken in first."""
IDLE_S = 0.7
"""Until the stores and their clients have mapped the memory of the next pages: questions are asked of an idle store."""
KEY = b"k" * 32


def serve(socket_path: Path, started: Connection) -> None:
    config = parse(f"store.arena_bytes = {3 * PAGES * FORMAT.page_bytes}")
    work = run_store(
        config,
        name=socket_path.stem,
        socket_path=socket_path,
        key=KEY,
        routers=(),
        ready=lambda info: started.send(info.address),
    )
    asyncio.run(work)


def start(folder: Path, name: str) -> tuple[multiprocessing.Process, str, StoreClient]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(folder / name, theirs), daemon=True)
    process.start()
    address: str = ours.recv()
    client = StoreClient(folder / name, KEY, owner=f"bench/{name}", format=FORMAT, grant_slots=PAGES)
    client.start()
    client.wait_attached(5)
    return process, address, client


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Memory at the start of a page, as an engine's KV cache is: 16 bytes past it, a copy can cost twice as much."""
    whole = np.zeros(size + mmap.PAGESIZE, np.uint8)
    start = -whole.ctypes.data % mmap.PAGESIZE
    return whole[start : start + size]


def ask_often(asked: StoreClient | Inquiry, names: list[PageName]) -> None:
    for _ in range(QUESTIONS):
        asked.exists(names)


def after_puts(asked: StoreClient, pages: Sequence[NamedPayload], names: list[PageName]) -> float:
    """Seconds of one question, of as many as there are pages, each right after the put of one."""
    taken_s = 0.0
    for page in pages:
        asked.put_many([page])
        taken_s += seconds(lambda: asked.exists(names))
    return taken_s / len(pages)


def asked_names(serial: int) -> list[PageName]:
    """What a round asks for, once its own pages are put."""
    end = (serial + 1) * PAGES
    return [name_of(number) for number in range(end - ASKED_NAMES, end)]


def name_of(number: int) -> PageName:
    """Of the page with this number; those before 0 were never put."""
    return PageName(number.to_bytes(16, "little", signed=True))


def push(near: StoreClient, far: StoreClient, names: list[PageName], address: str, serial: int) -> None:
    near.open_transfer(f"t{serial}", names, PAGES * FORMAT.page_tokens, address)
    while far.describe()["transfers_arrived"] <= serial:
        time.sleep(0.002)  # a question costs the store 0.1 ms, and both stores may have but two cores


def measure() -> dict[str, float]:
    """Median seconds of a copy, put, get and push of all pages, and of one question about 200 names.

    ``exists`` is asked of the client's own store, ``exists_remote`` of the other one over TCP: with nothing told
    between two questions. ``exists_after_put`` is asked of its own, each time right after it was told of a page.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-"))
    near_process, _, near = start(folder, "near")
    far_process, address, far = start(folder, "far")
    data = [np.random.default_rng(number).bytes(FORMAT.page_bytes) for number in range(PAGES)]
    source = np.frombuffer(b"".join(data), np.uint8)
    target = aligned(len(source))
    view, step = target.data, FORMAT.page_bytes
    places = [view[start : start + step] for start in range(0, len(target), step)]
    remote = Inquiry(address, KEY, sender="bench")
    taken: dict[str, list[float]] = {name: [] for name in ("copy", "put", "get", "push", *EXISTS, AFTER_PUT)}
    for serial in range(ROUNDS):
        time.sleep(IDLE_S)
        names, asked = [name_of(serial * PAGES + number) for number in range(PAGES)], asked_names(serial)
        pages = [(name, payload, FORMAT.page_tokens) for name, payload in zip(names, data, strict=True)]
        acts: dict[str, Callable[[], object]] = {
            "copy": lambda: np.copyto(target, source),
            "put": functools.partial(near.put_many, pages),
            "push": functools.partial(push, near, far, names, address, serial),
            "get": functools.partial(near.get_into, names, places),
            "exists": functools.partial(ask_often, near, asked),
            "exists_remote": functools.partial(ask_often, remote, asked),
        }
        for name, act in acts.items():
            time.sleep(IDLE_S if name in EXISTS else 0)
            taken[name].append(seconds(act))
        fresh = [
            (name_of((ROUNDS + 1) * PAGES + serial * QUESTIONS + number), data[number], FORMAT.page_tokens)
            for number in range(QUESTIONS)
        ]
        taken[AFTER_PUT].append(after_puts(near, fresh, asked))
    for client in (near, far, remote):
        client.close()
    for process in (near_process, far_process):
        process.terminate()
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {name: each / QUESTIONS if name in EXISTS else each for name, each in medians.items()}


def show_mooncake() -> None:
    found = mooncake.store(print)
    if mooncake.LEFT_OUT in found:
        return
    for name in ("put", "get"):
        print(f"Mooncake {name}  {PAGES * FORMAT.page_bytes / found[f'{name}_ms'] / 1e6:6.2f} GB/s")
    print(f"Mooncake exists of {ASKED_NAMES} names  {found['exists_ms']:.3f} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure a store beside a plain copy and Mooncake's.")
    parser.add_argument("--no-peer", action="store_true", help="leave Mooncake out, which would be installed first")
    options = parser.parse_args(arguments)
    taken_s = measure()
    size = PAGES * FORMAT.page_bytes
    for name in ("copy", "put", "get", "push"):
        print(f"{name:6} {size / taken_s[name] / 1e9:6.2f} GB/s   {taken_s['copy'] / taken_s[name]:5.2f} of a copy")
    for name in (*EXISTS, AFTER_PUT):
        print(f"{name} of {ASKED_NAMES} names  {taken_s[name] * 1e3:.3f} ms")
    if not options.no_peer:
        show_mooncake()


if __name__ == "__main__":
    main()
