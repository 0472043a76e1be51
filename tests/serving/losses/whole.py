"""Shows that a cluster is whole again after a loss: every decode worker is given work and loads what P computed."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from tests.serving import tiny
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.streams import PROMPT_TOKENS
from tests.serving.probe import BACK_S


async def whole_again(probe: Breakable, seed: int) -> None:
    """Each decode worker gets work when the other one is to have none, and loads what P's store pushed."""
    rng = random.Random(seed)
    for worker, other in itertools.permutations(probe.decoders):
        async with probe.without(other.name), asyncio.timeout(BACK_S):
            loaded = 0
            while loaded < PROMPT_TOKENS:
                # One after another: a worker that failed gets no more until it has answered.
                name, loaded = await _loaded_by(probe, tiny.completion(tiny.ids(rng, PROMPT_TOKENS), 10))
                assert name == worker.name


async def _loaded_by(probe: Breakable, body: dict[str, Any]) -> tuple[str, int]:
    """Who wrote an answer, and how many tokens of its prompt came from a store."""
    async with probe.http.post(f"{probe.cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        name = response.headers["x-request-id"]
    report = await probe.report(name)
    return report["decode_worker"], report.get("transfer", {}).get("loaded_tokens", 0)
