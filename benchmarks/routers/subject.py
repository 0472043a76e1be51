"""A router under test with its workers, all started for one measurement and ended after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.deploy.process import Child

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0
STOP_S = 5.0
STREAM_TICK_S = 0.005
"""Between two chunks of a stream, where streams are measured: 64 of them are 12,800 chunks a second."""


@dataclass(frozen=True)
class Subject:
    """Where to ask, and whose processor time is whose."""

    port: int
    model: str
    pids: dict[str, list[int]] = field(default_factory=dict)
    """``router`` and ``mocks``."""

    @property
    def router_pid(self) -> int:
        return self.pids["router"][0]


@contextlib.asynccontextmanager
async def process(
    name: str, command: Sequence[str], folder: Path, more: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """``command`` with its output in ``folder``, ended at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(more or {})}
    with (folder / f"{name}.log").open("wb") as output:
        child = await Child.start(name, command, environment, output)
        try:
            yield child
        finally:
            await asyncio.shield(child.stop(STOP_S))


@contextlib.asynccontextmanager
async def mocks(
    folder: Path, python: str, count: int, tick_s: float, *more: str
) -> AsyncIterator[tuple[Child, list[int]]]:
    """A process of mock engines and their ports."""
    command = [python, "-m", "benchmarks.routers.mock", str(count), str(tick_s), *more]
    async with process("mocks", command, folder) as child:
        yield child, json.loads(await line_of(folder / "mocks.log", "["))


async def line_of(log: Path, start: str) -> str:
    """The first line of ``log`` that begins with ``start``. Raises ``RuntimeError`` when none comes."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        for line in log.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith(start) and line.endswith("\n"):
                return line.strip()
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{log.name}: no line that begins with {start!r}:\n{log.read_text(errors='replace')[-2000:]}")


async def answers(port: int, model: str, folder: Path) -> None:
    """Wait until a completion comes through. Raises ``RuntimeError``."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
    until_s, said = time.monotonic() + START_S, ""
    while time.monotonic() < until_s:
        try:
            await asyncio.to_thread(_post, f"http://127.0.0.1:{port}/v1/completions", body)
            return
        except urllib.error.HTTPError as error:
            said = f"status {error.code}: {error.read()[:300]!r}"
        except OSError as error:
            said = repr(error)
        await asyncio.sleep(0.2)
    tails = "".join(f"\n{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in folder.glob("*.log"))
    raise RuntimeError(f"no answer within {START_S:g} s ({said}){tails}")


def _post(url: str, body: bytes) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        found: bytes = answer.read()
        return found
