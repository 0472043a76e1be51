"""Mooncake's Store under the load of ``benchmarks.store``: a master and one client; run in the environment that has it.

    python -m benchmarks.peers.mooncake_store

prints the median ms of a put and a get of all pages of a round and of one question about 200 names as one line of
JSON. All memory is registered and was written before. The client holds the pages itself: its put and get are copies
within one process, without checksums (its default), where ours cross to a store that outlives the client, and verify.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.store import FORMAT, IDLE_S, PAGES, QUESTIONS, ROUNDS, aligned, asked_names, name_of, seconds
from kvrelay.types import PageName

_HOST = "127.0.0.1"
_PORT, _METRICS_PORT = 50051, 9003
"""Free: the namespace has no other process."""
_START_S = 30.0
_STOP_S = 10.0
_SIZES = [FORMAT.page_bytes] * PAGES
_ROUND_BYTES = sum(_SIZES)
_BUFFER_BYTES = 64 << 20
"""What a client keeps for values that are not in registered memory; nothing here goes through it."""


@contextlib.contextmanager
def _master() -> Iterator[str]:
    """Its address."""
    flags = [f"--rpc_address={_HOST}", f"--rpc_port={_PORT}", f"--metrics_host={_HOST}"]
    flags += [f"--metrics_port={_METRICS_PORT}", "--enable_metric_reporting=false"]
    process = subprocess.Popen([Path(sys.prefix) / "bin" / "mooncake_master", *flags], stdout=sys.stderr)
    try:
        _wait_serving(process)
        yield f"{_HOST}:{_PORT}"
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_serving(process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, _PORT), 1.0):
            return
        time.sleep(0.1)
    raise RuntimeError("Mooncake's master does not serve")


def _client(master: str) -> Any:
    os.environ["MC_STORE_MEMCPY"] = "1"  # pages of its own are copied, not sent to itself over TCP
    client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    room = (ROUNDS + 1) * _ROUND_BYTES
    _all_ok([client.setup(_HOST, "P2PHANDSHAKE", room, _BUFFER_BYTES, "tcp", "", master)], "setup")
    return client


def _all_ok(codes: Sequence[int], what: str) -> None:
    if any(code < 0 for code in codes):
        raise RuntimeError(f"Mooncake: {what} returned {min(codes)}")


def _keys(names: Sequence[PageName]) -> list[str]:
    return [name.hex() for name in names]


def _ask_often(client: Any, keys: list[str]) -> None:
    for _ in range(QUESTIONS):
        _all_ok(client.batch_is_exist(keys), "batch_is_exist")


def _places(memory: npt.NDArray[np.uint8]) -> list[int]:
    """The address of every page in ``memory``."""
    return [memory.ctypes.data + start for start in range(0, memory.nbytes, FORMAT.page_bytes)]


def _touch(client: Any, here: list[int]) -> None:
    """Fill its memory once, so that no put pays for the first use of it: our stores map theirs ahead."""
    for serial in range(ROUNDS):
        keys = [f"{serial}/{number}" for number in range(PAGES)]
        _all_ok(client.batch_put_from(keys, here, _SIZES), "batch_put_from")
    if client.remove_all(True) != ROUNDS * PAGES:
        raise RuntimeError("Mooncake: pages were not removed")


def _round(client: Any, serial: int, here: list[int], there: list[int]) -> dict[str, float]:
    """Seconds of one put, one get and one question."""
    keys = _keys([name_of(serial * PAGES + number) for number in range(PAGES)])
    asked = _keys(asked_names(serial))
    time.sleep(IDLE_S)
    taken = {
        "put": seconds(lambda: _all_ok(client.batch_put_from(keys, here, _SIZES), "batch_put_from")),
        "get": seconds(lambda: _all_ok(client.batch_get_into(keys, there, _SIZES), "batch_get_into")),
    }
    time.sleep(IDLE_S)
    return taken | {"exists": seconds(lambda: _ask_often(client, asked)) / QUESTIONS}


def measure(client: Any) -> dict[str, float]:
    """Median ms of each. Raises ``RuntimeError`` when a call fails or a page is not what was put."""
    source, target = aligned(_ROUND_BYTES), aligned(_ROUND_BYTES)
    source[:] = np.random.default_rng(0).integers(0, 256, _ROUND_BYTES, np.uint8)
    _all_ok([client.register_buffer(memory.ctypes.data, memory.nbytes) for memory in (source, target)], "register")
    _touch(client, _places(source))
    rounds = [_round(client, serial, _places(source), _places(target)) for serial in range(ROUNDS)]
    if not np.array_equal(source, target) or not all(client.batch_is_exist(_keys(asked_names(ROUNDS - 1)))):
        raise RuntimeError("Mooncake: pages differ or are missing")
    return {f"{act}_ms": round(1e3 * statistics.median(one[act] for one in rounds), 3) for act in rounds[0]}


def main() -> None:
    with _master() as address:
        client = _client(address)
        print(json.dumps(measure(client)))
        client.close()


if __name__ == "__main__":
    main()
