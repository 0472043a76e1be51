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
from tests.serving.probe import prompt_tokens
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ONE, TWO, FOUR = Kind(1, 32), Kind(2, 128), Kind(4, 64)
HALF = Kind(1, 64, "bfloat16")
KINDS = {2: [ONE, TWO, FOUR], 4: [TWO, HALF]}
"""Engines by the model's KV heads; the first answers alone what the pairs must answer too."""
EXACT = [(2, pair) for pair in itertools.permutations((ONE, TWO, FOUR), 2)]
CONVERTED = [(4, (TWO, HALF)), (4, (HALF, TWO))]
LENGTHS = [2, 31, 64, 150, 300]
"""Less than a page, whole pages, whole blocks, a partial page, and three chunks with a partial page."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(
    request: pytest.FixtureRequest, http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("unlike")
    model = make_tiny(folder / "tiny", TinyShape(kv_heads=request.param))
    async with Site(folder, model, http).open(KINDS[request.param]) as site:
        yield site


def told(part: object) -> str:
    return f"{part[0].name}-to-{part[1].name}" if isinstance(part, tuple) else f"{part}-kv-heads"


async def tokens_from_outside(site: Site, kind: Kind, http: aiohttp.ClientSession) -> float:
    return (await prompt_tokens(http, site.url(kind)))["external_kv_transfer"]


@pytest.mark.parametrize(("site", "pair"), EXACT, ids=told, indirect=["site"])
async def test_each_length_equals_one_engine_alone(
    site: Site, pair: tuple[Kind, Kind], http: aiohttp.ClientSession
) -> None:
    prefill, decode = pair
    assert can_exchange(*(site.engines[kind].fingerprint for kind in pair)) == Exact()
    before = await tokens_from_outside(site, decode, http)
    for tokens in LENGTHS:
        ids = token_ids(site.model, tokens, number=10 * tokens + 2 * prefill.tensor_parallel + decode.tensor_parallel)
        expected = await site.ask(next(iter(site.engines)), ids, max_tokens=12, cache_salt="computed alone")
        answer = await site.hand_over(prefill, decode, ids, max_tokens=12)
        assert answer["token_ids"] == expected["token_ids"], f"{tokens} tokens"
    loaded = await tokens_from_outside(site, decode, http) - before
    assert loaded >= sum(LENGTHS) - len(LENGTHS), "at most each last token is computed"


@pytest.mark.parametrize(("site", "pair"), CONVERTED, ids=told, indirect=["site"])
async def test_converted_pages_change_an_answer_by_no_more_than_rounding(
    site: Site, pair: tuple[Kind, Kind], http: aiohttp.ClientSession
) -> None:
    prefill, decode = pair
    assert can_exchange(*(site.engines[kind].fingerprint for kind in pair)) == ByConversion(dtype=prefill.dtype)
    before = await tokens_from_outside(site, decode, http)
    wanted: dict[str, Any] = {"max_tokens": 1, "logprobs": 20, "return_tokens_as_token_ids": True}
    for tokens in LENGTHS:
        ids = token_ids(site.model, tokens, number=5000 + 10 * tokens + prefill.tensor_parallel)
        own = await site.ask(decode, ids, cache_salt="computed alone", **wanted)
        other = await site.hand_over(prefill, decode, ids, **wanted)
        mine, theirs = (choice["logprobs"]["top_logprobs"][0] for choice in (own, other))
        shared = mine.keys() & theirs.keys()
        assert len(shared) >= 10
        furthest = max(abs(mine[token] - theirs[token]) for token in shared)
        assert furthest < 0.6, "rounding (0.23 at most was seen), not garbage"
    assert await tokens_from_outside(site, decode, http) - before >= sum(LENGTHS) - len(LENGTHS)
