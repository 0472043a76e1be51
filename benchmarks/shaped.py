"""A prefill's KV over a link of 1 Gbit/s: how much of the transfer is left when the prefill ends.

Run:  python -m benchmarks.shaped          (as root on Linux with iproute2; about a minute)

Two stores in two network namespaces, joined by a link that tc shapes. The writer is simulated: it publishes layers at
the pace of a real prefill, so that neither store shares its core with a model.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shaping.namespaces import Namespace, shaped_pair, why_not
from benchmarks.shaping.prompt import FORMAT, PROMPT_TOKENS, Prompt, synthetic_kv
from kvrelay.store.client import StoreClient

LINK_BITS_S = 1_000_000_000
ROUNDS = 3
CODECS = ("auto", "raw")
"""Settings of ``store.codec``; the first is the product's own."""
PORT = 7070
KEY = b"k" * 32
RESULTS = Path(__file__).parent / "results" / "shaped.json"


class Node(NamedTuple):
    """One store, and a client of it."""

    address: str
    client: StoreClient


class Figures(NamedTuple):
    """Seconds of one round."""

    serial_s: float
    exposed_s: float


def measure() -> dict[str, Any]:
    """Medians of ``ROUNDS`` rounds, and ``codecs``: the same by ``store.codec``.

    ``{"skipped": why}`` where namespaces cannot be made.
    """
    reason = why_not()
    if reason:
        return {"skipped": reason}
    rows = {codec: _measure(codec) for codec in CODECS}
    return {
        "link_gbit_s": LINK_BITS_S / 1e9,
        "writer": "simulated at the pace of a real prefill",
        "prompt_tokens": PROMPT_TOKENS,
        "bytes": PROMPT_TOKENS * FORMAT.layers * FORMAT.token_layer_bytes,
        **rows[CODECS[0]],
        "codecs": rows,
    }


def _measure(codec: str) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        here, there = stack.enter_context(shaped_pair(LINK_BITS_S))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-")))
        ways = ((here, there), (there, here))
        near, far = (stack.enter_context(_node(folder, *ends, codec)) for ends in ways)
        rounds = _rounds(near.client, far)
        saved = far.client.describe().get("codec_bytes_saved", 0) / far.client.describe()["bytes_received"]
    serial_s = statistics.median(each.serial_s for each in rounds)
    exposed_s = statistics.median(each.exposed_s for each in rounds)
    return {
        "ratio": round(1 + saved, 3),
        "serial_ms": round(1e3 * serial_s, 1),
        "exposed_ms": round(1e3 * exposed_s, 1),
        "exposed_share": round(exposed_s / serial_s, 4),
        "rounds": [{"serial_ms": round(1e3 * s, 1), "exposed_ms": round(1e3 * e, 1)} for s, e in rounds],
    }


@contextlib.contextmanager
def _node(folder: Path, here: Namespace, there: Namespace, codec: str) -> Iterator[Node]:
    """A store in the namespace ``here`` that may push to the one in ``there``."""
    socket, key, config = (folder / f"{here.name}.{suffix}" for suffix in ("sock", "key", "toml"))
    key.write_bytes(KEY)
    key.chmod(0o600)
    config.write_text(
        f'store.peer_host = "{here.address}"\nstore.peer_port = {PORT}\nstore.peers = ["{there.address}:{PORT}"]\n'
        # Namespaces share their machine's memory: between two machines there would be no such way.
        f'store.transports = ["tcp"]\nstore.codec = "{codec}"\n'
    )
    words = ("-m", "kvrelay", "store", "--socket", str(socket), "--key-file", str(key), "--config", str(config))
    process = subprocess.Popen(here.command(sys.executable, *words), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the store did not start"
        client = StoreClient(socket, KEY, owner="bench/1", format=FORMAT, grant_slots=128)
        client.start()
        client.wait_attached(5)
        yield Node(f"{here.address}:{PORT}", client)
        client.close()
    finally:
        process.terminate()
        process.wait(10)


def _rounds(near: StoreClient, far: Node) -> list[Figures]:
    data = synthetic_kv()
    _serial(near, far, Prompt(data), "warm-up")
    return [
        Figures(
            _serial(near, far, Prompt(data), f"serial-{number}"),
            _overlapped(near, far, Prompt(data), f"overlapped-{number}"),
        )
        for number in range(ROUNDS)
    ]


def _serial(near: StoreClient, far: Node, prompt: Prompt, transfer: str) -> float:
    """Seconds of the whole prompt's transfer, begun when all of it is there."""
    prompt.put(near)
    arrived = far.client.describe()["transfers_arrived"]
    started = time.perf_counter()
    near.open_transfer(transfer, prompt.names, PROMPT_TOKENS, far.address)
    return _arrival(far.client, arrived) - started


def _overlapped(near: StoreClient, far: Node, prompt: Prompt, transfer: str) -> float:
    """Seconds from the end of the prefill until the far store has everything."""
    arrived = far.client.describe()["transfers_arrived"]
    near.open_transfer(transfer, prompt.names, PROMPT_TOKENS, far.address)
    ended = prompt.compute(near, transfer)
    return _arrival(far.client, arrived) - ended


def _arrival(client: StoreClient, before: int) -> float:
    """When the store has one whole transfer more than ``before``."""
    deadline = time.monotonic() + 30
    while client.describe()["transfers_arrived"] <= before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the transfer did not arrive: {client.describe()}")
        time.sleep(0.0005)
    return time.perf_counter()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, whoever ends this
    figures = measure()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
