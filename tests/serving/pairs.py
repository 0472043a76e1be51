"""Pairs of engines of one node: what one writes, the other answers from."""

from __future__ import annotations

import aiohttp

from benchmarks.pairs.site import Kind, Site
from kvrelay.identity import Exact, can_exchange
from tests.serving.probe import prompt_tokens
from tests.serving.texts import token_ids

ONE, TWO, FOUR = Kind(1, 32), Kind(2, 128), Kind(4, 64)
HALF = Kind(1, 64, "bfloat16")
LENGTHS = [2, 31, 64, 150, 300]
"""Less than a page, whole pages, whole blocks, a partial page, and three chunks with a partial page."""


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
