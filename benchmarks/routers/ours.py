"""kvrelay's router with mock workers and stores, as ``kvrelay router`` runs it."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from benchmarks.routers.holders import MODEL
from benchmarks.routers.subject import Subject, answers, line_of, mocks, process
from kvrelay.config import Config, RouterConfig
from kvrelay.config_text import render
from kvrelay.deploy.key import new_key, write_secret
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.progress import READY_MARK

SPLIT, COLOCATED = "ppdd", "bb"
"""Roles of the mock workers: two and two, or two that do both."""


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
            yield Subject(port=port, model=MODEL, pids={"router": [child.pid], "mocks": [fakes.pid]})
