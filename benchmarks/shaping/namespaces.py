"""Two network namespaces joined by a link of a given speed. Nothing leaves them, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

ADDRESSES = ("198.18.0.1", "198.18.0.2")
"""Reserved for benchmarks; they exist in these namespaces alone."""
DEVICE = "veth0"
BURST_BYTES = 128 << 10
QUEUE_MS = 20
"""Longest wait in the shaper's queue: a switch with shallow buffers."""


@dataclass(frozen=True)
class Namespace:
    """One end of the link."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """``words`` as a command that runs in here."""
        return ["ip", "netns", "exec", self.name, *words]


def why_not() -> str:
    """Why this machine cannot make them; empty when it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    name = f"kvrelay-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        _run("ip", "netns", "delete", name)
        return ""
    return f"network namespaces cannot be made here (root is needed): {made.stderr.strip()}"


@contextlib.contextmanager
def shaped_pair(bits_per_s: int) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces whose link carries ``bits_per_s`` each way; they and the link are gone afterwards."""
    ends = [Namespace(f"kvrelay-{os.getpid()}-{side}", ADDRESSES[side]) for side in (0, 1)]
    with contextlib.ExitStack() as stack:
        for end in ends:
            _run("ip", "netns", "add", end.name)
            stack.callback(_run, "ip", "netns", "delete", end.name)
        near, far = ends
        # Deleting a namespace deletes its end of the link, and with it the other end.
        far_end = ("peer", "name", DEVICE, "netns", far.name)
        _run("ip", "-n", near.name, "link", "add", DEVICE, "type", "veth", *far_end)
        for end in ends:
            _shape(end, bits_per_s)
        yield near, far


def _shape(end: Namespace, bits_per_s: int) -> None:
    _run("ip", "-n", end.name, "link", "set", "lo", "up")
    _run("ip", "-n", end.name, "address", "add", f"{end.address}/30", "dev", DEVICE)
    _run("ip", "-n", end.name, "link", "set", DEVICE, "up")
    limits = ("rate", f"{bits_per_s}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
    _run("tc", "-n", end.name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *limits)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
