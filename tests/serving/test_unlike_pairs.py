"""Pages of one engine serve another of unlike tensor parallelism and block size, on two KV heads."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.pairs.site import Kind, Site
from kvrelay.deploy.tiny import TinyShape, make_tiny
from tests.serving.pairs import FOUR, ONE, TWO, equals_one_engine_alone, told

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_heads(http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Engines of a model with 2 KV heads; on four ranks, two ranks share a head."""
    folder = tmp_path_factory.mktemp("two-heads")
    async with Site(folder, make_tiny(folder / "tiny", TinyShape(kv_heads=2)), http).open([ONE, TWO, FOUR]) as site:
        yield site


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.permutations((ONE, TWO, FOUR), 2)), ids=told)
async def test_two_kv_heads_on_any_ranks_equal_one_engine_alone(
    two_heads: Site, prefill: Kind, decode: Kind, http: aiohttp.ClientSession
) -> None:
    await equals_one_engine_alone(two_heads, prefill, decode, http)
