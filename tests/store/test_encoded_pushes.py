"""Pages that travel encoded: exact ones come back to the byte, rounded ones are sound too, and both ends must agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrelay.channel import Channel, connect
from kvrelay.config import StoreConfig
from kvrelay.errors import Lost
from kvrelay.protocol.peer import PushClosed, PushDamaged, PushOpen, PushPages, PushWanted, Segments
from kvrelay.store.arena import checksums
from kvrelay.store.codec import Run, decode, encode, usable
from kvrelay.store.codecs import Codecs
from kvrelay.store.packing import Packed, pack
from kvrelay.store.paths.streams import Streams
from kvrelay.types import Codec, PageFormat, Transport
from tests.patience import PATIENCE_S, until
from tests.store import test_paths
from tests.store.conftest import FORMAT, KEY, manifest, page_name
from tests.store.test_paths import CONTROL, Ends, ends_of

ROUNDED = msgspec.structs.replace(FORMAT, lossy=Codec.INT8)
PAGES = range(6)
LAST_TOKENS = 3
TOTAL = 8 * 5 + LAST_TOKENS
needs_zstandard = pytest.mark.skipif(not usable(Codec.LOSSLESS), reason="zstandard is not installed")


def kv(number: int, tokens: int = 8, format: PageFormat = FORMAT) -> bytes:
    """A page of numbers as KV has them."""
    elements = tokens * format.token_layer_bytes * format.layers // 4
    return np.random.default_rng(number).standard_normal(elements, np.float32).tobytes()


def tokens(number: int) -> int:
    return LAST_TOKENS if number == PAGES[-1] else 8


def rounded(number: int) -> bytes:
    """The page as ``ROUNDED`` pages come out."""
    data, run_bytes = kv(number, tokens(number)), tokens(number) * 4 * FORMAT.head_dim
    payload = b"".join(encode(Codec.INT8, [Run(memoryview(data), run_bytes)], FORMAT.dtype))
    return decode(Codec.INT8, memoryview(payload), len(data), FORMAT.dtype).tobytes()


@pytest.fixture(autouse=True)
def real_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_paths, "payload", kv)


@pytest.fixture(params=[CONTROL, Transport.TCP], ids=str)
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ends]:
    async with ends_of(tmp_path, request.param) as pair:
        yield pair


def propose(monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    """As over a slow link."""
    monkeypatch.setattr(Codecs, "propose", lambda self, *facts: codec)


async def push_all(ends: Ends, format: PageFormat = FORMAT, shards: int = 1) -> None:
    for number in PAGES:
        ends.p.put(number, tokens(number), shards, format)
    ends.p.push("t", PAGES, TOTAL, ends.d, format)
    await until(lambda: ends.d.keeper.counts["transfers_arrived"] == 1)


@needs_zstandard
@pytest.mark.parametrize("shards", [1, 2])
async def test_packed_pages_take_fewer_bytes_and_come_back_to_the_byte(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    propose(monkeypatch, Codec.LOSSLESS)
    await push_all(ends, shards=shards)
    assert [ends.d.read(number) for number in PAGES] == [kv(number, tokens(number)) for number in PAGES]
    counts, size = ends.d.keeper.counts, sum(len(kv(number, tokens(number))) for number in PAGES)
    assert counts["codec_bytes_saved"] > 0.1 * size
    assert counts["bytes_received"] + counts["codec_bytes_saved"] == size
    await ends.settled()


@pytest.mark.parametrize("shards", [1, 2])
async def test_rounded_pages_are_what_the_codec_says_and_verify_like_others(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    propose(monkeypatch, Codec.INT8)
    await push_all(ends, ROUNDED, shards)
    assert [ends.d.read(number) for number in PAGES] == [rounded(number) for number in PAGES]
    assert ends.d.keeper.counts["bytes_received"] < 0.3 * sum(len(kv(number, tokens(number))) for number in PAGES)
    await ends.settled()


async def test_a_page_that_goes_on_to_a_third_store_is_not_rounded_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose(monkeypatch, Codec.INT8)
    async with ends_of(tmp_path, CONTROL) as first:
        await push_all(first, ROUNDED)
        (tmp_path / "on").mkdir()
        async with ends_of(tmp_path / "on", CONTROL) as second:
            first.d.daemon.peers.meet([second.d.address])
            first.d.push("on", PAGES, TOTAL, second.d, ROUNDED)
            await until(lambda: second.d.keeper.counts["transfers_arrived"] == 1)
            assert [second.d.read(number) for number in PAGES] == [rounded(number) for number in PAGES]


@pytest.mark.parametrize("codec", [pytest.param(Codec.LOSSLESS, marks=needs_zstandard), Codec.INT8])
async def test_what_the_receiver_does_not_take_travels_as_it_is(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    propose(monkeypatch, codec)
    monkeypatch.setattr(ends.d.daemon.codecs, "_config", StoreConfig(codec="raw"))
    await push_all(ends, ROUNDED)
    assert [ends.d.read(number) for number in PAGES] == [kv(number, tokens(number)) for number in PAGES]
    assert ends.d.keeper.counts["codec_bytes_saved"] == 0


@pytest.mark.parametrize("codec", [pytest.param(Codec.LOSSLESS, marks=needs_zstandard), Codec.INT8])
async def test_bytes_that_were_damaged_in_memory_are_never_published(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    propose(monkeypatch, codec)
    for number in range(3):
        ends.p.put(number, format=ROUNDED)
    page = ends.p.page(1)
    assert page is not None
    ends.p.shelf(ROUNDED).arena.segment(page.ref.slot, 2, 8)[7] ^= 4
    ends.p.push("t", range(3), 24, ends.d, ROUNDED)
    await until(lambda: ends.d.keeper.counts["transfers_failed"] == 1)
    assert ends.d.page(1) is None
    await until(lambda: ends.p.keeper.counts["pages_damaged"] == 1)
    await ends.settled()


async def test_a_batch_whose_stream_breaks_goes_encoded_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose(monkeypatch, Codec.INT8)
    async with ends_of(tmp_path, Transport.TCP) as ends:
        broken: list[Channel] = []
        send = Streams._send

        async def once(self: Streams, link: Channel, *rest: Any) -> None:
            if not broken:
                broken.append(link)
                link.close()
                raise Lost("cut")
            await send(self, link, *rest)

        monkeypatch.setattr(Streams, "_send", once)
        await push_all(ends, ROUNDED)
        assert [ends.d.read(number) for number in PAGES] == [rounded(number) for number in PAGES]


# ---------------------------------------------------------------- a peer that breaks the rules


async def rogue(ends: Ends, format: PageFormat, codec: Codec) -> Channel:
    """A link that has offered page 0, and been asked for it."""
    link = await connect(ends.d.address, KEY, sender="rogue", purpose="peer")
    await link.send(PushOpen(transfer="r", format=format, names=[page_name(0)], total_tokens=8, codec=codec))
    await link.send(PushPages(transfer="r", indices=[0]))
    answer = await link.recv()
    assert isinstance(answer, PushWanted)
    assert answer.codec is (codec if codec is format.lossy else Codec.RAW)
    return link


def encoded() -> tuple[Segments, Packed]:
    data = memoryview(kv(0))
    sums = [[each] for each in checksums(data, FORMAT.segment_bytes)]
    packed = pack(Codec.INT8, [data], sums, ROUNDED)
    assert packed is not None
    items = [(0, layer, each) for layer, each in enumerate(sums)]
    message = Segments(
        transfer="r",
        manifest=manifest(*items),
        payload_bytes=packed.size_bytes,
        codec=Codec.INT8,
        wire_checksum=packed.checksum,
    )
    return message, packed


def views(packed: Packed) -> list[memoryview]:
    return [memoryview(piece) for piece in packed.pieces]


async def is_cut_off(link: Channel) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await link.recv()
    except Lost:
        return True


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Ends]:
    async with ends_of(tmp_path, CONTROL) as both:
        yield both
        await both.settled()


async def test_an_encoded_push_by_hand_is_taken_so_that_the_tests_below_mean_something(pair: Ends) -> None:
    link = await rogue(pair, ROUNDED, Codec.INT8)
    message, packed = encoded()
    await link.send(message, views(packed))
    await until(lambda: pair.d.read(0) == rounded(0))
    link.close()


async def test_a_codec_that_was_not_agreed_on_ends_the_link(pair: Ends) -> None:
    link = await rogue(pair, FORMAT, Codec.INT8)
    message, packed = encoded()
    await link.send(message, views(packed))
    assert await is_cut_off(link)
    assert pair.d.page(0) is None


@pytest.mark.parametrize("payload_bytes", [1 << 20, len(kv(0))])
async def test_an_encoded_payload_that_is_no_shorter_ends_the_link(pair: Ends, payload_bytes: int) -> None:
    link = await rogue(pair, ROUNDED, Codec.INT8)
    message, _ = encoded()
    await link.send(msgspec.structs.replace(message, payload_bytes=payload_bytes))
    assert await is_cut_off(link)


async def test_a_payload_that_nobody_can_have_encoded_ends_the_link(pair: Ends) -> None:
    link = await rogue(pair, ROUNDED, Codec.INT8)
    message, packed = encoded()
    nonsense = memoryview(bytes(packed.size_bytes))
    (checksum,) = checksums(nonsense, len(nonsense))
    await link.send(msgspec.structs.replace(message, wire_checksum=checksum), [nonsense])
    assert await is_cut_off(link)
    assert pair.d.page(0) is None


async def test_a_push_that_is_opened_again_while_its_pages_are_on_their_way_is_refused(pair: Ends) -> None:
    link = await rogue(pair, FORMAT, Codec.RAW)
    transfers = pair.d.keeper.transfers
    transfers.expire(pair.d.now + 1000)  # it fails ...
    transfers.expire(pair.d.now + 3000)  # ... and is forgotten
    assert transfers.get("r") is None
    await link.send(PushOpen(transfer="r", format=FORMAT, names=[page_name(0)], total_tokens=8))
    async with asyncio.timeout(PATIENCE_S):
        answer = await link.recv()
    assert isinstance(answer, PushClosed)
    assert not answer.complete
    link.close()


async def test_damage_on_the_way_costs_the_pages_and_not_the_link(pair: Ends) -> None:
    link = await rogue(pair, ROUNDED, Codec.INT8)
    message, packed = encoded()
    damaged = bytearray(b"".join(packed.pieces))
    damaged[-1] ^= 1
    await link.send(message, [memoryview(damaged)])
    answer = await link.recv()
    assert isinstance(answer, PushDamaged)
    assert answer.names == [page_name(0)]
    assert pair.d.page(0) is None
    assert not link.over.done()
    link.close()
