"""Pages of one engine serve another of unlike tensor parallelism, block size or KV type."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.pairs.site import Kind, Site
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.identity import ByConversion, Exact, can_exchange
from tests.serving.logprobs import assert_close
from tests.serving.probe import prompt_tokens
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ONE, TWO, FOUR = Kind(1, 32), Kind(2, 128), Kind(4, 64)
HALF = Kind(1, 64, "bfloat16")
LENGTHS = [2, 31, 64, 150, 300]
"""Less than a page, whole pages, whole blocks, a partial page, and three chunks with a partial page."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_heads(http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Engines of a model with 2 KV heads; on four ranks, two ranks share a head."""
    folder = tmp_path_factory.mktemp("two-heads")
    async with Site(folder, make_tiny(folder / "tiny", TinyShape(kv_heads=2)), http).open([ONE, TWO, FOUR]) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def four_heads(http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Engines of a model with 4 KV heads, in float32 and bfloat16."""
    folder = tmp_path_factory.mktemp("four-heads")
    async with Site(folder, make_tiny(folder / "tiny", TinyShape(kv_heads=4)), http).open([TWO, FOUR, HALF]) as site:
        yield site


def told(kind: Kind) -> str:
    return kind.name


async def tokens_from_outside(site: Site, kind: Kind, http: aiohttp.ClientSession) -> float:
    return (await prompt_tokens(http, site.url(kind)))["external_kv_transfer"]


async def equals_one_engine_alone(site: Site, prefill: Kind, decode: Kind, http: aiohttp.ClientSession) -> None:
    """Each length's greedy text is that of the site's first engine, and D computes no more than each last token."""
    assert can_exchange(site.engines[prefill].fingerprint, site.engines[decode].fingerprint) == Exact()
    before = await tokens_from_outside(site, decode, http)
    for tokens in LENGTHS:
        ids = token_ids(site.model, tokens, number=10 * tokens + 2 * prefill.tensor_parallel + decode.tensor_parallel)
        expected = await site.ask(next(iter(site.engines)), ids, max_tokens=24, cache_salt="computed alone")
        answer = await site.hand_over(prefill, decode, ids, max_tokens=24)
        assert answer["token_ids"] == expected["token_ids"], f"{tokens} tokens"
    loaded = await tokens_from_outside(site, decode, http) - before
    assert loaded >= sum(LENGTHS) - len(LENGTHS), "at most each last token is computed"


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.permutations((ONE, TWO, FOUR), 2)), ids=told)
async def test_two_kv_heads_on_any_ranks_equal_one_engine_alone(
    two_heads: Site, prefill: Kind, decode: Kind, http: aiohttp.ClientSession
) -> None:
    await equals_one_engine_alone(two_heads, prefill, decode, http)


@pytest.mark.parametrize(("prefill", "decode"), [(TWO, FOUR), (FOUR, TWO)], ids=told)
async def test_four_kv_heads_on_any_ranks_equal_one_engine_alone(
    four_heads: Site, prefill: Kind, decode: Kind, http: aiohttp.ClientSession
) -> None:
    await equals_one_engine_alone(four_heads, prefill, decode, http)


@pytest.mark.parametrize(("prefill", "decode"), [(TWO, HALF), (FOUR, HALF), (HALF, TWO)], ids=told)
async def test_converted_pages_change_an_answer_by_no_more_than_rounding(
    four_heads: Site, prefill: Kind, decode: Kind, http: aiohttp.ClientSession
) -> None:
    site = four_heads
    other, own = site.engines[prefill].fingerprint, site.engines[decode].fingerprint
    assert can_exchange(other, own) == ByConversion(dtype=prefill.dtype)
    before = await tokens_from_outside(site, decode, http)
    wanted: dict[str, Any] = {"max_tokens": 1, "logprobs": 20, "return_tokens_as_token_ids": True}
    for tokens in LENGTHS:
        ids = token_ids(site.model, tokens, number=5000 + 10 * tokens + prefill.tensor_parallel)
        alone = await site.ask(decode, ids, cache_salt="computed alone", **wanted)
        answer = await site.hand_over(prefill, decode, ids, **wanted)
        assert_close(*(choice["logprobs"]["top_logprobs"][0] for choice in (alone, answer)))
    assert await tokens_from_outside(site, decode, http) - before >= sum(LENGTHS) - len(LENGTHS)
