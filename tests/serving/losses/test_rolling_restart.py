"""Every worker is drained, killed and started again while clients ask, as in an upgrade: nobody's request fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from tests.serving.conftest import Baseline
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.streams import Answer, bodies, read
from tests.serving.probe import BACK_S, prompt_tokens
from tests.serving.tiny import at_most

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

CLIENTS = 3
QUESTIONS = 20
PAUSE_S = 0.2
"""Between two requests of a client: an engine that starts needs the processor, too."""
DEADLINE_S = 0.5
"""Streams that run longer move: most of those that are caught, for a restarting engine slows the others down."""


class Clients:
    """Ask again and again, whatever is done to the workers; each answer equals the baseline."""

    def __init__(self, probe: Breakable, asked: list[dict[str, Any]], expected: list[Any]) -> None:
        self._probe = probe
        self._questions = itertools.cycle(zip(asked, expected, strict=True))
        self._over = False
        self.answered = 0

    def __repr__(self) -> str:
        return f"<Clients, {self.answered} answers>"

    async def ask(self) -> None:
        """Raises AssertionError, or what the client would see, with the first request that fails."""
        while not self._over:
            body, right = next(self._questions)
            (await read(self._probe, body, Answer())).assert_whole(right)
            self.answered += 1
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """They ask inside the block, and what they began is answered at its end."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self.ask())
            yield
            self._over = True


async def drain(probe: Breakable, name: str) -> None:
    """As an operator does it."""
    controls = [word for control in probe.cluster.controls for word in ("--router", control)]
    options = ["--key-file", str(probe.cluster.run.key), "--deadline-s", str(DEADLINE_S), *controls]
    command = [sys.executable, "-m", "kvrelay", "drain", name, *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


async def prompts_seen(probe: Breakable, url: str) -> float:
    return sum((await prompt_tokens(probe.http, url)).values())


async def test_every_worker_is_restarted_in_turn_and_no_request_fails(
    probe: Breakable, tiny_baseline: Baseline
) -> None:
    asked = bodies(200, QUESTIONS)
    expected = await at_most(CLIENTS, (partial(tiny_baseline.ask, "/v1/completions", body) for body in asked))
    clients = Clients(probe, asked, expected)
    async with clients.asking():
        for worker in probe.cluster.workers:
            answered = clients.answered
            await drain(probe, worker.name)
            await probe.cluster.restart(worker.name)
            assert clients.answered > answered + CLIENTS, "clients were served meanwhile"
        async with asyncio.timeout(BACK_S):
            while not all([await prompts_seen(probe, worker.url) for worker in probe.cluster.workers]):
                await asyncio.sleep(0.2)
    await probe.assert_at_rest()
