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

from kvrelay.cli.draining import Routers
from kvrelay.types import Role
from tests.serving.conftest import Baseline
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.streams import PROMPT_TOKENS, Answer, bodies, read
from tests.serving.probe import BACK_S, prompt_tokens
from tests.serving.tiny import PAGE_TOKENS, at_most

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

CLIENTS = 2
QUESTIONS = 5
ANSWER_TOKENS = 500
"""So long that a worker that is seen to write an answer still does when it is drained."""
DEADLINE_S = 0.5
"""Of the command: a prefill worker has no stream that could move then, and what it has ends all the same."""
PAUSE_S = 1.0
"""Between two requests of a client: an engine that starts needs the processor, too."""


class Clients:
    """Ask again and again, whatever is done to the workers; each answer equals the baseline."""

    def __init__(self, probe: Breakable, asked: list[dict[str, Any]], expected: list[Any]) -> None:
        self._probe = probe
        self._questions = itertools.cycle(zip(asked, expected, strict=True))
        self._over = False
        self.answered = 0
        self.losses: list[dict[str, Any]] = []
        """Of all answers, as the router tells them."""

    def __repr__(self) -> str:
        return f"<Clients, {self.answered} answers>"

    async def ask(self) -> None:
        """Raises AssertionError, or what the client would see, with the first request that fails."""
        while not self._over:
            body, right = next(self._questions)
            answer = await read(self._probe, body, Answer())
            answer.assert_whole(right)
            self.answered += 1
            self.losses += (await self._probe.report(answer.request_id)).get("resumptions", [])
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


async def hand_over(probe: Breakable, name: str) -> None:
    """As the command does whose deadline is over at once, when ``name`` writes an answer."""
    await probe.until_writing(name)
    async with Routers(probe.cluster.controls, probe.cluster.key) as routers, asyncio.timeout(BACK_S):
        said = await routers.drain(name)
        while not said.is_empty:
            said = await routers.hand_over(name)
            await asyncio.sleep(0.05)


async def prompts_seen(probe: Breakable, url: str) -> float:
    return sum((await prompt_tokens(probe.http, url)).values())


async def test_every_worker_is_restarted_in_turn_and_no_request_fails(
    probe: Breakable, tiny_baseline: Baseline
) -> None:
    asked = bodies(200, QUESTIONS, ANSWER_TOKENS)
    expected = await at_most(CLIENTS, (partial(tiny_baseline.ask, "/v1/completions", body) for body in asked))
    clients = Clients(probe, asked, expected)
    async with clients.asking():
        for worker in probe.cluster.workers:
            answered = clients.answered
            await (hand_over if worker.role is Role.DECODE else drain)(probe, worker.name)
            await probe.cluster.restart(worker.name)
            assert clients.answered > answered + CLIENTS, "clients were served meanwhile"
        async with asyncio.timeout(BACK_S):
            while not all([await prompts_seen(probe, worker.url) for worker in probe.cluster.workers]):
                await asyncio.sleep(0.2)
    moved = [loss for loss in clients.losses if loss["reason"] == "drained"]
    assert clients.losses == moved, "nobody lost a worker but by its drain"
    assert {loss["lost_worker"] for loss in moved} == {worker.name for worker in probe.decoders}
    assert all(loss["cached_tokens"] >= PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS for loss in moved), "by pages"
    await probe.assert_at_rest()
