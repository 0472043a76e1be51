"""What plain sockets give for the same pages: two processes and one stream, with nothing around them but checksums.

Run:  python -m benchmarks.sockets            (an idle machine with two cores or more, or the figures mean little)

The pages lie scattered on both sides. Both sides block in the kernel, 512 pieces of memory a call; the receiver has the
checksum of each layer of each page computed, 4 MiB after 4 MiB. A push over TCP does this and more.
"""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import xxhash

from benchmarks.links import LOADS, ROUNDS, Load, show

PIECES = 512
"""Pieces of memory a call, as the stores have it."""
VERIFY_BYTES = 4 << 20
PAUSE_S = 0.1


def _pages(load: Load, order: int) -> list[memoryview]:
    """Every page's memory, written before, in an order of its own."""
    memory = mmap.mmap(-1, load.size_bytes)
    np.frombuffer(memory, np.uint8)[:] = 1
    step, view = load.format.page_bytes, memoryview(memory)
    return [view[at * step : (at + 1) * step] for at in np.random.default_rng(order).permutation(load.pages).tolist()]


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of ``views`` after ``moved`` bytes."""
    for number, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[number + 1 :]]
        moved -= len(view)
    return []


def _batches(views: list[memoryview]) -> Iterator[list[memoryview]]:
    count = max(1, VERIFY_BYTES // len(views[0]))
    for start in range(0, len(views), count):
        yield views[start : start + count]


def _receive(load: Load, verify: bool, pipe: Connection) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    link, _ = listener.accept()
    views, step = _pages(load, 1), load.format.segment_bytes
    for _ in range(ROUNDS):
        for batch in _batches(views):
            rest = batch
            while rest:
                rest = _rest(rest, link.recvmsg_into(rest[:PIECES])[0])
            if verify:
                for view in batch:
                    for start in range(0, len(view), step):
                        xxhash.xxh3_64_intdigest(view[start : start + step])
        link.sendall(b"!")


def raw_tcp(load: Load, *, verify: bool) -> list[float]:
    """Seconds until the receiver has said that all pages are in, and verified."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_receive, args=(load, verify, theirs), daemon=True)
    process.start()
    seconds: list[float] = []
    with socket.create_connection(("127.0.0.1", ours.recv())) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        views = _pages(load, 2)
        for _ in range(ROUNDS):
            time.sleep(PAUSE_S)
            rest, started = views, time.perf_counter()
            while rest:
                rest = _rest(rest, link.sendmsg(rest[:PIECES]))
            link.recv(1)
            seconds.append(time.perf_counter() - started)
    process.join()
    return seconds


def main() -> None:
    for load in LOADS:
        show("sockets", load, raw_tcp(load, verify=False))
        show("and checksums", load, raw_tcp(load, verify=True))


if __name__ == "__main__":
    main()
