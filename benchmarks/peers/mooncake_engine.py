"""Mooncake's TransferEngine over TCP, from one process to another; run in the environment that has it.

    python -m benchmarks.peers.mooncake_engine

prints the median GB/s of each load of ``benchmarks.links`` as one line of JSON. All pieces of a round are one call,
in memory that is registered and was written before; one round goes before those that are timed. Its settings are its
own, by which it pools connections: 16 of them instead of 4, or slices of 1 MiB instead of 64 KiB, gave no more.
"""

from __future__ import annotations

import importlib
import json
import mmap
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.links import LOADS, ROUNDS, Load
from benchmarks.transports import gb_per_s

_HOST = "127.0.0.1"
_MARK = 7
"""What the sender's bytes are; the receiver's are 1."""
_ANSWER_S = 60.0
"""Longest wait for the receiver, which registers or compares some 64 MB."""


def _engine_with(memory: npt.NDArray[np.uint8]) -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    _ok(engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
    _ok(engine.register_memory(memory.ctypes.data, memory.nbytes), "register_memory")
    return engine


def _ok(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"Mooncake: {what} returned {code}")


def _memory(size: int, mark: int) -> npt.NDArray[np.uint8]:
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:] = mark
    return memory


def _receive(size: int, pipe: Connection) -> None:
    memory = _memory(size, 1)
    engine = _engine_with(memory)
    pipe.send((engine.get_rpc_port(), memory.ctypes.data))
    pipe.recv()
    pipe.send(bool((memory == _MARK).all()))
    pipe.recv()


def writes_s(load: Load) -> list[float]:
    """Seconds of each write of all pages, scattered on both sides. Raises ``RuntimeError`` when bytes are missing."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_receive, args=(load.size_bytes, theirs), daemon=True)
    process.start()
    theirs.close()  # the receiver's end is the only one: when it dies, that is heard
    try:
        seconds = _each_write_s(load, ours)
        process.join(_ANSWER_S)
    finally:
        process.kill()
    return seconds[1:]


def _each_write_s(load: Load, ours: Connection) -> list[float]:
    """Of all rounds, the first one included."""
    memory = _memory(load.size_bytes, _MARK)
    engine = _engine_with(memory)
    port, base = _answer(ours)
    lengths = [load.format.page_bytes] * load.pages
    seconds: list[float] = []
    for serial in range(ROUNDS + 1):
        order = np.random.default_rng(serial).permutation(load.pages) * load.format.page_bytes
        here, there = (memory.ctypes.data + order).tolist(), (base + order[::-1]).tolist()
        started = time.perf_counter()
        _ok(engine.batch_transfer_sync_write(f"{_HOST}:{port}", here, there, lengths), "batch_transfer_sync_write")
        seconds.append(time.perf_counter() - started)
    ours.send("look")
    if not _answer(ours):
        raise RuntimeError("Mooncake: bytes are missing")
    ours.send("end")
    return seconds


def _answer(receiver: Connection) -> Any:
    """What the receiver says next. Raises ``RuntimeError`` when it says nothing for ``_ANSWER_S``, or has died."""
    try:
        if receiver.poll(_ANSWER_S):
            return receiver.recv()
    except EOFError as error:
        raise RuntimeError("Mooncake: the receiver has died") from error
    raise RuntimeError(f"Mooncake: the receiver said nothing for {_ANSWER_S:g} s")


def main() -> None:
    print(json.dumps({load.what: gb_per_s(load, writes_s(load)) for load in LOADS}))


if __name__ == "__main__":
    main()
