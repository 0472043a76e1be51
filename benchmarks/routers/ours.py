"""kvrelay's router with mock workers and stores, as ``kvrelay router`` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from benchmarks.routers.holders import MODEL
from benchmarks.routers.subject import START_S, Subject, answers, line_of, mocks, process
from kvrelay.config import Config, RouterConfig
from kvrelay.config_text import render
from kvrelay.deploy.key import new_key, write_secret
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.progress import READY_MARK

SPLIT, COLOCATED = "ppdd", "bb"
"""Roles of the mock workers: two and two, or two that do both."""

_SPLIT = re.compile(rb'^kvrelay_requests_total\{path="remote_prefill",status="200"\} [1-9]', re.MULTILINE)


async def _splits(port: int, folder: Path) -> None:
    """Ask until a request goes over two workers: stores may dial later than workers. Raises ``RuntimeError``."""
    until_s = time.monotonic() + START_S
    while not _SPLIT.search(await asyncio.to_thread(_metrics, port)):
        if time.monotonic() > until_s:
            raise RuntimeError(f"no request was split within {START_S:g} s")
        await asyncio.sleep(0.2)
        await answers(port, MODEL, folder)


def _metrics(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        found: bytes = answer.read()
        return found


@contextlib.asynccontextmanager
async def kvrelay(
    roles: str = SPLIT, tick_s: float = 0.0, *, router: RouterConfig | None = None
) -> AsyncIterator[Subject]:
    """Prompts are always split where they can be: the mocks' speed would make the router prefer D alone."""
    port, control = free_port(), free_port()
    settings = msgspec.structs.replace(router or RouterConfig(local_prefill="never"), port=port, control_port=control)
    with tempfile.TemporaryDirectory(prefix="bench-router-") as name:
        folder, key, model = Path(name), Path(name) / "key", str(fetch())
        write_secret(key, new_key())
        (folder / "config.toml").write_text(render(Config(router=settings)))
        command = [sys.executable, "-m", "kvrelay", "router", "--key-file", str(key), "--model", model]
        async with contextlib.AsyncExitStack() as stack:
            child = await stack.enter_async_context(
                process("router", [*command, "--config", str(folder / "config.toml")], folder)
            )
            await line_of(folder / "router.log", READY_MARK)
            given = (f"127.0.0.1:{control}", str(key), roles, model)
            fakes, _ = await stack.enter_async_context(mocks(folder, sys.executable, len(roles), tick_s, *given))
            await answers(port, MODEL, folder)
            if "p" in roles:
                await _splits(port, folder)
            yield Subject(port=port, model=MODEL, pids={"router": [child.pid], "mocks": [fakes.pid]})
