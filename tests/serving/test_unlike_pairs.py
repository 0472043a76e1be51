"""Pages of one engine serve another of unlike tensor parallelism and block size: greedy answers stay equal."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from kvrelay.deploy.tiny import TinyShape, make_tiny
from tests.serving.engines import Kind, Site
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ONE, TWO, FOUR = Kind(1, 32), Kind(2, 128), Kind(4, 64)
PAIRS = [(ONE, TWO), (TWO, ONE), (TWO, FOUR), (FOUR, TWO), (ONE, FOUR), (FOUR, ONE)]
LENGTHS = [1, 31, 64, 150, 300]
"""Less than a page, whole pages, whole blocks, a partial page, and three chunks with a partial page."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[4, 2], ids=["4-kv-heads", "2-kv-heads"])
async def site(
    request: pytest.FixtureRequest, http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("unlike")
    model = make_tiny(folder / "tiny", TinyShape(kv_heads=request.param))
    async with Site(folder, model, http).open([ONE, TWO, FOUR]) as site:
        yield site


def prompt(site: Site, tokens: int, number: int) -> list[int]:
    return token_ids(site.model, tokens, number)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"tp{pair[0].tensor_parallel}-to-tp{pair[1].tensor_parallel}")
async def test_each_length_equals_the_unsplit_engine(site: Site, pair: tuple[Kind, Kind]) -> None:
    prefill, decode = pair
    before = await site.prompt_tokens(decode)
    for tokens in LENGTHS:
        ids = prompt(site, tokens, number=10 * tokens + PAIRS.index(pair))
        expected = await site.ask(ONE, ids, max_tokens=24, cache_salt="computed alone")
        answer = await site.hand_over(prefill, decode, ids, max_tokens=24)
        assert answer["token_ids"] == expected["token_ids"], tokens
    after = await site.prompt_tokens(decode)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] >= sum(LENGTHS) - len(LENGTHS)
