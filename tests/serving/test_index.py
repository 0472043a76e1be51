"""What the index says of a real engine is what that engine then finds in its own cache, to the token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from kvrelay.config import Config, ModelConfig, WorkerConfig
from kvrelay.deploy.engine import engine_spec
from kvrelay.deploy.engine_pages import EnginePages
from kvrelay.deploy.event_relay import EventRelay
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.scratch import scratch
from kvrelay.deploy.server import plain_engine, socket_parent
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.fleet.index import PageIndex
from kvrelay.fleet.page_log import PageLog
from kvrelay.identity import NAMING_VERSION, name_pages, root_name
from kvrelay.types import Engine, Fingerprint, PageFormat, Role
from tests.serving.probe import Probe
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

BLOCK, PAGE = 64, 32
SHAPE = TinyShape()
FORM = PageFormat(layers=1, kv_heads=1, head_dim=1, dtype="float32", page_tokens=PAGE)
FINGERPRINT = Fingerprint(weights="tiny", weights_epoch=0, format=FORM, naming=NAMING_VERSION, engine="vllm")
KV_TOKENS = 40 * BLOCK
ENGINE = Engine(
    fingerprint=FINGERPRINT, kv_tokens=KV_TOKENS, block_tokens=BLOCK, max_model_len=512, max_batched_tokens=512
)


class Ear:
    """Somebody who listens to the engine's events and tells an index of them."""

    def __init__(self, folder: Path) -> None:
        self.log = PageLog("i1")
        self.relay = EventRelay(folder, EnginePages(self.log, lambda: ENGINE))
        self.index = PageIndex()
        self._told = self.log.follow(self.index.open("w", "i1", 0.0).after)
        self._task = asyncio.create_task(self.relay.run())

    def _hear(self) -> None:
        while (message := next(self._told)) is not None:
            assert self.index.take("w", "i1", message, 0.0) is None

    async def catch_up(self, alone: Alone) -> None:
        """Return once everything that the engine did is known here: a block that it computes now is."""
        fence = [random.randrange(10, 200) for _ in range(BLOCK)]
        await alone.cached([*fence, 1])
        async with asyncio.timeout(20):
            while self.expect([*fence, 1]) == 0:
                await asyncio.sleep(0.01)

    def expect(self, tokens: list[int], salt: str = "") -> int:
        """Tokens of a prompt that the engine will find in its cache."""
        self._hear()
        names = name_pages(root_name(FINGERPRINT, salt=salt), tokens, PAGE)
        held = self.index.find(names).at("w") * PAGE
        return min(held // BLOCK, (len(tokens) - 1) // BLOCK) * BLOCK

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Alone:
    """One engine without a cluster, whose cache holds forty blocks."""

    def __init__(self, url: str, folder: Path, http: aiohttp.ClientSession) -> None:
        self.url, self.folder, self._http = url, folder, http

    async def cached(self, tokens: list[int], salt: str | None = None) -> int:
        """Tokens of a prompt that the engine found in its cache."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
        async with self._http.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            usage = (await response.json())["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def clear(self) -> None:
        async with self._http.post(f"{self.url}/reset_prefix_cache") as response:
            assert response.status == 200
        await self.cached([5, 6, 7])  # what happened is published with the next step


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(tmp_path_factory: pytest.TempPathFactory, http: aiohttp.ClientSession) -> AsyncIterator[Alone]:
    model = make_tiny(tmp_path_factory.mktemp("tiny"), SHAPE)
    token_bytes = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4
    config = Config(
        model=ModelConfig(dtype="float32", name="tiny"),
        worker=WorkerConfig(
            kv_cache_bytes=KV_TOKENS * token_bytes, block_tokens=BLOCK, max_model_len=512, max_batched_tokens=512
        ),
    )
    with scratch("events-", socket_parent()) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        spec = msgspec.structs.replace(engine_spec(config, model, port=free_port(), cpus=(0,)), events=folder)
        async with plain_engine(spec, tmp_path_factory.mktemp("alone") / "log") as engine:
            yield Alone(engine.url, folder, http)


@pytest_asyncio.fixture(loop_scope="session")
async def ear(alone: Alone) -> AsyncIterator[Ear]:
    ear = Ear(alone.folder)
    await asyncio.sleep(0.5)
    yield ear
    await ear.close()


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share prefixes of many lengths."""
    dice = random.Random(seed)
    stems = [[dice.randrange(10, 200) for _ in range(400)] for _ in range(6)]
    return [
        dice.choice(stems)[: dice.randrange(0, 380)] + [dice.randrange(10, 200) for _ in range(dice.randrange(1, 100))]
        for _ in range(count)
    ]


async def test_every_hit_is_foretold_also_when_blocks_are_evicted(alone: Alone, ear: Ear) -> None:
    hits = []
    for prompt in prompts(60, seed=1):
        await ear.catch_up(alone)
        expected = ear.expect(prompt)
        hits.append(expected)
        assert await alone.cached(prompt) == expected
    assert sum(hits) > 1000
    assert len(ear.index) <= KV_TOKENS // PAGE
    assert (ear.relay.losses, ear.index.gaps) == (0, 0)


async def test_tenants_with_a_salt_share_nothing(alone: Alone, ear: Ear) -> None:
    (prompt,) = prompts(1, seed=3)
    prompt = prompt + list(range(10, 150))
    for salt in ("a", "b"):
        assert (ear.expect(prompt, salt), await alone.cached(prompt, salt)) == (0, 0)
        await ear.catch_up(alone)
        assert await alone.cached(prompt, salt) == ear.expect(prompt, salt) > 0


async def test_who_listens_late_is_told_of_what_was_before(alone: Alone, ear: Ear) -> None:
    late = Ear(alone.folder)
    await asyncio.gather(ear.catch_up(alone), late.catch_up(alone))
    await asyncio.gather(ear.catch_up(alone), late.catch_up(alone))
    for prompt in prompts(20, seed=1):
        assert late.expect(prompt) == ear.expect(prompt)
    await late.close()


async def never_hear(*_: object) -> None:
    """Let a batch get lost."""


async def test_a_batch_that_got_lost_is_noticed_with_the_next_one_and_told_again(
    alone: Alone, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prompts(2, seed=9)
    await alone.cached(first)
    await ear.catch_up(alone)
    monkeypatch.setattr(ear.relay, "_hear", never_hear)
    for prompt in prompts(3, seed=10):
        await alone.cached(prompt)
    await asyncio.sleep(1.0)
    monkeypatch.undo()
    await ear.catch_up(alone)
    assert ear.relay.replays == 1
    for prompt in (first, second, *prompts(3, seed=10)):
        assert ear.expect(prompt) == await alone.cached(prompt)
        await ear.catch_up(alone)
    assert ear.relay.losses == 0


async def test_a_cleared_cache_holds_nothing(alone: Alone, ear: Ear) -> None:
    prompt = prompts(1, seed=20)[0] + list(range(10, 150))
    await alone.cached(prompt)
    await ear.catch_up(alone)
    assert ear.expect(prompt) > 0
    await alone.clear()
    await ear.catch_up(alone)
    assert (ear.expect(prompt), await alone.cached(prompt)) == (0, 0)


async def test_a_router_that_starts_late_knows_what_workers_and_stores_hold(probe: Probe, model: Path) -> None:
    async def known() -> dict[str, float]:
        values = await probe.metrics(probe.cluster.url)
        return {
            key: value
            for key, value in values.items()
            if key.startswith(("kvrelay_worker_pages{worker", "kvrelay_store_pages{store"))
        }

    body = {"model": "smollm2", "prompt": token_ids(model, 400, number=4321), "max_tokens": 4, "temperature": 0}
    async with probe.http.post(f"{probe.cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
    await probe.assert_at_rest()
    await asyncio.sleep(0.5)
    before = await known()
    workers = {worker.name: worker.role for worker in probe.cluster.workers}
    assert all(before[f"kvrelay_worker_pages{{worker={name}}}"] >= 3 * 4 for name in workers)
    assert max(value for key, value in before.items() if "store" in key) >= 400 // PAGE
    assert Role.PREFILL in workers.values()
    await probe.cluster.restart("router")
    for _ in range(40):
        if await known() == before:
            break
        await asyncio.sleep(0.1)
    assert await known() == before
