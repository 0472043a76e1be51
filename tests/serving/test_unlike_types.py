"""Pages of one engine serve another of unlike KV type, and of unlike ranks on four KV heads.

A module of its own, so that engines of two models do not spin beside each other.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.pairs.site import Kind, Site
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.identity import ByConversion, can_exchange
from tests.serving.logprobs import assert_close
from tests.serving.pairs import FOUR, HALF, LENGTHS, ONE, TWO, equals_one_engine_alone, tokens_from_outside, told
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def four_heads(http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Engines of a model with 4 KV heads, in float32 and bfloat16."""
    folder = tmp_path_factory.mktemp("four-heads")
    async with Site(folder, make_tiny(folder / "tiny", TinyShape(kv_heads=4)), http).open(
        [ONE, TWO, FOUR, HALF]
    ) as site:
        yield site


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.permutations((ONE, TWO, FOUR), 2)), ids=told)
async def test_four_kv_heads_on_any_ranks_equal_one_engine_alone(
    four_heads: Site, prefill: Kind, decode: Kind, http: aiohttp.ClientSession
) -> None:
    await equals_one_engine_alone(four_heads, prefill, decode, http)


@pytest.mark.parametrize(
    ("prefill", "decode"), [*itertools.product((ONE, TWO, FOUR), (HALF,)), (HALF, TWO), (HALF, FOUR)], ids=told
)
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
