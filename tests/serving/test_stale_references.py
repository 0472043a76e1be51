"""A reference to pages that is stale, repeated, unknown, out of range or expired brings nobody wrong KV: it is refused
and counted, and the engine computes, or fails the request where its operator chose that."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from benchmarks.pairs.site import KEY, Kind, Site
from kvrelay.identity import name_pages, root_name
from kvrelay.protocol.client import Held
from kvrelay.protocol.engine import HANDOFF_KEY, DecodeLeg, PrefillLeg, handoff_params
from kvrelay.store import keeper
from kvrelay.store.client import StoreClient
from kvrelay.store.eviction import EvictionOrder
from kvrelay.store.page import Page
from kvrelay.store.transfers import Transfers
from kvrelay.types import PageName, SlotRef, Stage
from tests.serving.probe import prompt_tokens
from tests.serving.tiny import ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PAGE = 32
PROMPT_TOKENS = 150
"""Four whole pages and a part of one."""
HOUR_S = 3600.0
COMPUTES = Kind(1, PAGE, cpus="0", load_wait_s=1.0)
FAILS = Kind(1, PAGE, cpus="1", load_wait_s=1.0, on_bad_page="fail")

_dice = random.Random(40)
_transfers = (f"transfer-{number}" for number in itertools.count())


class Place:
    """Two engines at one store, and what each counted."""

    def __init__(self, site: Site, store: StoreClient, http: aiohttp.ClientSession) -> None:
        self.site = site
        self.store = store
        self._http = http

    async def counts(self) -> dict[str, int]:
        return await asyncio.to_thread(self.store.describe)  # the store lives in this thread

    async def pages(self, names: list[PageName]) -> list[bool]:
        return await asyncio.to_thread(self.store.exists, names)

    async def counted(self, count: str, before: dict[str, int]) -> None:
        """Return once ``count`` is more than it was."""
        async with asyncio.timeout(10):
            while (await self.counts()).get(count, 0) <= before.get(count, 0):
                await asyncio.sleep(0.05)

    async def prefilled(self, prompt: list[int], transfer: str, *, by: Kind = FAILS) -> None:
        """All pages of ``prompt`` are in the store."""
        await self.site.ask(by, prompt, PrefillLeg(transfer=transfer, push_to=None), max_tokens=1)
        async with asyncio.timeout(10):
            while not all(await self.pages(self.names(prompt))):
                await asyncio.sleep(0.02)

    def names(self, prompt: list[int]) -> list[PageName]:
        return name_pages(root_name(self.site.engines[COMPUTES].fingerprint), prompt, PAGE)

    async def alone(self, prompt: list[int]) -> list[int]:
        """What an engine writes that finds nothing."""
        answer = await self.site.ask(COMPUTES, prompt, cache_salt="computed alone", max_tokens=12)
        return list(answer["token_ids"])

    async def decoded(self, prompt: list[int], *transfers: str, **fields: Any) -> tuple[list[int], float]:
        """What the engine writes that computes what it lacks, and how many tokens of the prompt it loaded."""
        before = await self._loaded_tokens()
        leg = DecodeLeg(transfers=list(transfers))
        answer = await self.site.ask(COMPUTES, prompt, leg, max_tokens=12, **fields)
        return list(answer["token_ids"]), await self._loaded_tokens() - before

    async def status(self, kind: Kind, prompt: list[int], transfer: str) -> int:
        """Of ``kind``'s answer to the decode leg."""
        leg = handoff_params(DecodeLeg(transfers=[transfer]))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "kv_transfer_params": leg}
        url = f"{self.site.url(kind)}/v1/completions"
        async with self._http.post(url, json=body, headers=self.site.headers) as response:
            return response.status

    async def _loaded_tokens(self) -> float:
        return (await prompt_tokens(self._http, self.site.url(COMPUTES)))["external_kv_transfer"]

    async def assert_at_rest(self) -> None:
        """Nothing is pinned, awaited or being filled."""
        held = ("leases_open", "pages_pinned", "pages_filling", "slots_failed")
        counts = await self.counts()
        async with asyncio.timeout(10):
            while any(counts[key] for key in held):
                await asyncio.sleep(0.1)
                counts = await self.counts()
        assert counts["slots_occupied"] == counts["pages_used"] + counts["slots_granted"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(
    tiny_model: Path, http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("stale")
    async with Site(folder, tiny_model, http).open([COMPUTES, FAILS]) as site:
        form = site.engines[COMPUTES].fingerprint.format
        store = StoreClient(folder / "store.sock", KEY, owner="test/1", format=form)
        store.start()
        try:
            assert await asyncio.to_thread(store.wait_attached, 10)
            yield Place(site, store, http)
        finally:
            await asyncio.to_thread(store.close)


# ---------------------------------------------------------------- hand-offs: what a router says of a prompt


async def test_the_hand_off_of_another_prompt_brings_nothing_of_it(place: Place) -> None:
    others, own = ids(_dice, PROMPT_TOKENS), ids(_dice, PROMPT_TOKENS)
    stale = next(_transfers)
    await place.prefilled(others, stale)
    before = await place.counts()
    assert await place.decoded(own, stale) == (await place.alone(own), 0)
    await place.counted("handoffs_incomplete", before)
    await place.assert_at_rest()


async def test_a_hand_off_that_is_used_again_brings_its_own_prompt_each_time(place: Place) -> None:
    first, second = ids(_dice, PROMPT_TOKENS), ids(_dice, PROMPT_TOKENS)
    transfer = next(_transfers)
    for prompt in (first, second):
        await place.prefilled(prompt, transfer)
        expected = await place.alone(prompt)
        written, loaded = await place.decoded(prompt, transfer)
        assert (written, loaded) == (expected, PROMPT_TOKENS)
        assert (await place.decoded(prompt, transfer, transfer))[0] == expected
    await place.assert_at_rest()


async def test_a_hand_off_that_nobody_knows_is_not_waited_for_long(place: Place) -> None:
    prompt, before = ids(_dice, PROMPT_TOKENS), await place.counts()
    assert await place.decoded(prompt, next(_transfers)) == (await place.alone(prompt), 0)
    await place.counted("handoffs_unheard", before)
    await place.assert_at_rest()


async def test_a_hand_off_whose_pages_were_evicted_is_computed(place: Place) -> None:
    prompt, transfer = ids(_dice, 4 * PAGE), next(_transfers)  # a partial page would be spared for its lease
    await place.prefilled(prompt, transfer)
    await asyncio.to_thread(fill_up, place.store)
    assert not any(await place.pages(place.names(prompt)))
    before = await place.counts()
    assert await place.decoded(prompt, transfer) == (await place.alone(prompt), 0)
    await place.counted("handoffs_incomplete", before)
    await place.assert_at_rest()


async def test_a_hand_off_whose_leases_lapsed_is_computed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has forgotten it, and given up what it spares for it, a partial page."""
    prompt, transfer = ids(_dice, PROMPT_TOKENS), next(_transfers)
    await place.prefilled(prompt, transfer)
    with monkeypatch.context() as patch:
        await an_hour_later(patch)
        await asyncio.to_thread(fill_up, place.store)
    assert not any(await place.pages(place.names(prompt)))
    before = await place.counts()
    assert await place.decoded(prompt, transfer) == (await place.alone(prompt), 0)
    await place.counted("handoffs_unheard", before)
    await place.assert_at_rest()


async def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return once the store, which lives in this process, has seen the clock of its leases an hour on."""
    expire, first, seen = Transfers.expire, EvictionOrder.first, asyncio.Event()

    def expired(self: Transfers, now: float) -> None:
        expire(self, now + HOUR_S)
        seen.set()

    monkeypatch.setattr(Transfers, "expire", expired)
    monkeypatch.setattr(EvictionOrder, "first", lambda self, now: first(self, now + HOUR_S))
    async with asyncio.timeout(10):
        await seen.wait()


def fill_up(store: StoreClient) -> None:
    """Put new pages into every slot."""
    arena = store.arena
    assert arena is not None
    payload = bytes(arena.format.page_bytes)
    for _ in range(0, arena.slots, 256):
        store.put_many([(PageName(secrets.token_bytes(16)), payload, PAGE) for _ in range(256)])


@pytest.mark.parametrize(
    "params",
    [
        {"type": "DecodeLeg", "transfers": "all"},
        {"type": "DecodeLeg", "transfers": [None]},
        {"type": "DecodeLeg"},
        {"type": "Neither"},
        ["transfer"],
    ],
    ids=str,
)
async def test_a_hand_off_that_cannot_be_read_is_counted_and_computed(place: Place, params: object) -> None:
    prompt = ids(_dice, PROMPT_TOKENS)
    before = await place.counts()
    answer = await place.site.ask(COMPUTES, prompt, max_tokens=12, kv_transfer_params={HANDOFF_KEY: params})
    await place.counted("handoffs_malformed", before)
    assert answer["token_ids"] == await place.alone(prompt)
    await place.assert_at_rest()


@pytest.mark.parametrize("address", ["192.0.2.1:7", "127.0.0.1:99999", "nowhere"])
async def test_a_hand_off_to_a_place_that_is_no_peer_goes_nowhere(place: Place, address: str) -> None:
    prompt, transfer = ids(_dice, PROMPT_TOKENS), next(_transfers)
    answer = await place.site.ask(FAILS, prompt, PrefillLeg(transfer=transfer, push_to=address), max_tokens=12)
    assert answer["token_ids"] == await place.alone(prompt)
    assert (await place.counts())["pushes_open"] == 0
    await place.assert_at_rest()


# ---------------------------------------------------------------- slots: what a store says of a page

SLOTS: dict[str, Callable[[SlotRef], SlotRef]] = {
    "stale": lambda ref: SlotRef(ref.slot, ref.generation - 1),
    "of an incarnation before": lambda ref: SlotRef(ref.slot, 7),
    "of a life to come": lambda ref: SlotRef(ref.slot, ref.generation + 1),
    "out of range": lambda ref: SlotRef(ref.slot + (1 << 30), ref.generation),
    "before the first one": lambda ref: SlotRef(-1, ref.generation),
}
SOUND_PAGES = 2
"""The reference to the page after them is wrong: it was evicted between the lookup and the load, say."""


def mislead(monkeypatch: pytest.MonkeyPatch, name: PageName, change: Callable[[SlotRef], SlotRef]) -> None:
    """From here on the store, which lives in this process, hands out changed references to one page."""
    right = keeper._held

    def held(page: Page) -> Held:
        said = right(page)
        return msgspec.structs.replace(said, slot=change(said.slot)) if page.name == name else said

    monkeypatch.setattr(keeper, "_held", held)


@pytest.mark.parametrize("kind", SLOTS)
async def test_a_wrong_reference_to_a_slot_is_refused_counted_and_computed(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    prompt, transfer = ids(_dice, PROMPT_TOKENS), next(_transfers)
    await place.prefilled(prompt, transfer)
    before, loads = await place.counts(), heard_loads(monkeypatch)
    mislead(monkeypatch, place.names(prompt)[SOUND_PAGES], SLOTS[kind])
    written, _ = await place.decoded(prompt, transfer)
    await place.counted("load_page_lost", before)
    assert written == await place.alone(prompt)
    assert loads == [SOUND_PAGES * PAGE], "the engine computed the rest alone"
    await place.assert_at_rest()


def heard_loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each load, as the engine tells them to the store, from here on."""
    relay = Transfers.relay
    loads: list[int] = []

    def relayed(self: Transfers, id: str, stage: Stage, reason: str, tokens: int, now: float) -> None:
        loads.extend([tokens] if stage is Stage.LOADED else [])
        relay(self, id, stage, reason, tokens, now)

    monkeypatch.setattr(Transfers, "relay", relayed)
    return loads


async def test_a_reference_that_no_arena_can_have_ends_the_link_and_the_engine_computes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, transfer = ids(_dice, PROMPT_TOKENS), next(_transfers)
    await place.prefilled(prompt, transfer)
    with monkeypatch.context() as patch:
        mislead(patch, place.names(prompt)[SOUND_PAGES], lambda ref: SlotRef(1 << 63, ref.generation))
        assert await place.decoded(prompt, transfer) == (await place.alone(prompt), 0)
    await place.assert_at_rest()


@pytest.mark.parametrize("kind", SLOTS)
async def test_where_the_operator_chose_it_a_wrong_reference_fails_its_request_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    prompt, transfer = ids(_dice, PROMPT_TOKENS), next(_transfers)
    await place.prefilled(prompt, transfer, by=COMPUTES)
    before = await place.counts()
    with monkeypatch.context() as patch:
        mislead(patch, place.names(prompt)[SOUND_PAGES], SLOTS[kind])
        assert await place.status(FAILS, prompt, transfer) == 500
        await place.counted("load_page_lost", before)
    answer = await place.site.ask(FAILS, prompt, DecodeLeg(transfers=[transfer]), max_tokens=12)
    assert answer["token_ids"] == await place.alone(prompt)
    await place.assert_at_rest()
