"""Peers and clients that break the rules: none may harm another, nor make a bad page look good."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import xxhash

from kvrelay.channel import Channel, Listener, bind_tcp, connect
from kvrelay.errors import Lost, Refused
from kvrelay.protocol.client import Acquire, Allocate, Announce, Attach, Attached, Describe, Described, Granted, NewPage
from kvrelay.protocol.frame import MAX_FRAME_BYTES, encode
from kvrelay.protocol.message import Message
from kvrelay.protocol.peer import Manifest, PushClosed, PushOpen, PushPages, PushWanted, Segments, Taken
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, PageName, SlotRef
from tests.patience import PATIENCE_S, until_on_thread
from tests.store.conftest import FORMAT, KEY, StoreProcess, manifest, page_name, payload

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]
SEGMENT = FORMAT.segment_bytes

pytestmark = pytest.mark.slow
"""Each test starts store processes of its own."""


@contextlib.asynccontextmanager
async def peer(store: StoreProcess, name: str = "rogue") -> AsyncIterator[Channel]:
    link = await connect(store.address, KEY, sender=name, purpose="peer")
    try:
        yield link
    finally:
        link.close()


async def ended(link: Channel) -> None:
    """The store ended this link."""
    with contextlib.suppress(Lost):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await link.recv()


def segments(number: int, layers: range = range(FORMAT.layers), page: int = 0) -> tuple[Segments, list[memoryview]]:
    data = payload(number)
    parts = [memoryview(data)[layer * SEGMENT : (layer + 1) * SEGMENT] for layer in layers]
    what = [(page, layer, [xxhash.xxh3_64_intdigest(part)]) for layer, part in zip(layers, parts, strict=True)]
    return Segments(transfer="t", manifest=manifest(*what), payload_bytes=sum(map(len, parts))), parts


async def offer(link: Channel, *numbers: int) -> list[int]:
    names = [page_name(number) for number in numbers]
    await link.send(PushOpen(transfer="t", format=FORMAT, names=names, total_tokens=8 * len(names)))
    await link.send(PushPages(transfer="t", indices=list(range(len(names)))))
    answer = await link.recv()
    assert isinstance(answer, PushWanted)
    return answer.indices


def is_idle(client: StoreClient) -> bool:
    counts = client.describe()
    return not any(counts[name] for name in ("pages_pinned", "pages_filling", "slots_failed", "transfers_open"))


async def test_a_hand_made_push_is_accepted_so_that_the_tests_below_mean_something(
    start_store: Start, connect: Connect
) -> None:
    store = start_store()
    client = connect(store)
    async with peer(store) as link:
        assert await offer(link, 1) == [0]
        await link.send(*segments(1))
        await link.send(PushClosed(transfer="t", complete=True))
        await until_on_thread(lambda: client.describe()["transfers_arrived"] == 1)
    assert client.get(page_name(1)) == payload(1)


async def test_a_truncated_push_is_never_used(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    async with peer(store) as link:
        await offer(link, 1)
        message, parts = segments(1)
        await link.send(message, [*parts[:-1], parts[-1][:-1]])
    await until_on_thread(lambda: client.describe()["transfers_failed"] == 1)
    assert client.exists([page_name(1)]) == [False]
    await until_on_thread(lambda: is_idle(client))


async def test_a_push_that_stops_in_the_middle_of_a_payload_is_given_up(start_store: Start, connect: Connect) -> None:
    store = start_store(toml="store.stalled_push_s = 0.3")
    client = connect(store)
    async with peer(store) as link:
        await offer(link, 1)
        message, parts = segments(1)
        await link.send(message, parts[:1])
        await ended(link)
    await until_on_thread(lambda: client.describe()["pages_failed"] == 1 and is_idle(client))


async def test_a_wrong_checksum_fails_the_page_even_when_its_other_layers_are_right(
    start_store: Start, connect: Connect
) -> None:
    store = start_store()
    client = connect(store)
    async with peer(store) as link:
        await offer(link, 1)
        message, parts = segments(1)
        message.manifest.checksums[-1] = 12345
        await link.send(message, parts)
        await until_on_thread(lambda: client.describe()["checksum_failures"] == 1)
        await link.send(*segments(1))
        await link.send(PushClosed(transfer="t", complete=True))
        await until_on_thread(lambda: client.describe()["transfers_failed"] == 1)
    assert client.exists([page_name(1)]) == [False]
    await until_on_thread(lambda: is_idle(client))


async def test_a_page_number_that_was_damaged_on_its_way_never_brings_one_page_into_another(
    start_store: Start, connect: Connect
) -> None:
    store = start_store()
    client = connect(store)
    async with peer(store) as link:
        await offer(link, 1, 2)
        (second, data), (claims, _) = (segments(2, range(1), page) for page in (1, 0))
        right, wrong = encode(second), encode(claims)
        where = next(at for at, (good, bad) in enumerate(zip(right, wrong, strict=True)) if good != bad)
        link._sock.send(right[:where] + wrong[where : where + 1] + right[where + 1 :] + bytes(data[0]))
        with contextlib.suppress(Lost):
            await link.send(*segments(1))
        await ended(link)
    await until_on_thread(lambda: client.describe()["transfers_failed"] == 1)
    assert client.get_many([page_name(1), page_name(2)]) == [None, None]
    await until_on_thread(lambda: is_idle(client))


async def test_a_layer_sent_twice_cannot_change_a_page(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    async with peer(store) as link:
        await offer(link, 1)
        await link.send(*segments(1))
        await link.send(*segments(2))
        await link.send(*segments(2, range(1)))
        await link.send(PushClosed(transfer="t", complete=True))
        await until_on_thread(lambda: client.describe()["transfers_arrived"] == 1)
    assert client.get(page_name(1)) == payload(1)


async def test_a_page_that_was_not_asked_for_is_not_taken(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    client.put(page_name(1), payload(1), 8)
    assert client.exists([page_name(1)]) == [True]
    async with peer(store) as link:
        assert await offer(link, 1, 2) == [1]
        await link.send(*segments(7))
        await link.send(*segments(2, page=1))
        await link.send(PushClosed(transfer="t", complete=True))
        await until_on_thread(lambda: client.describe()["transfers_arrived"] == 1)
    assert (client.get(page_name(1)), client.get(page_name(2))) == (payload(1), payload(2))


BAD_FROM_PEER: list[Message] = [
    Describe(id=1),
    PushOpen(transfer="u", format=FORMAT, names=[PageName(b"short")], total_tokens=8),
    PushOpen(transfer="u", format=FORMAT, names=[page_name(1)] * 2, total_tokens=16),
    PushOpen(transfer="u", format=FORMAT, names=[page_name(1)], total_tokens=80),
    PushPages(transfer="t", indices=[99]),
    PushPages(transfer="t", indices=[-1]),
    Segments(transfer="t", manifest=manifest((5, 0, [0])), payload_bytes=SEGMENT),
    Segments(transfer="t", manifest=manifest((0, 0, [0])), payload_bytes=SEGMENT + 1),
    Segments(transfer="t", manifest=manifest(), payload_bytes=1 << 40),
    Segments(transfer="t", manifest=manifest(), payload_bytes=-1),
    Segments(transfer="unknown", manifest=manifest(), payload_bytes=0),
    Segments(transfer="t", manifest=Manifest([0], [0, 1], [0]), payload_bytes=SEGMENT),
    Segments(transfer="t", manifest=Manifest([0, 0], [0, 1], [0]), payload_bytes=2 * SEGMENT),
    Segments(transfer="t", manifest=Manifest([0], [FORMAT.layers], [0]), payload_bytes=SEGMENT),
    Segments(transfer="t", manifest=Manifest([-1], [0], [0]), payload_bytes=SEGMENT),
    Segments(transfer="t", manifest=Manifest([0], [0], [-1]), payload_bytes=SEGMENT),
    Segments(transfer="t", manifest=Manifest([0], [1 << 63], [0]), payload_bytes=SEGMENT),
    Segments(transfer="t", manifest=manifest((0, 0, [0]), (0, 0, [0])), payload_bytes=2 * SEGMENT),
    Segments(transfer="t", manifest=manifest((1, 0, [0, 0, 0])), payload_bytes=SEGMENT),
]
"""Page 0 of the push was asked for, page 1 was here already."""


@pytest.mark.parametrize("message", BAD_FROM_PEER, ids=repr)
async def test_a_peer_that_breaks_the_rules_loses_its_link_and_its_pages(
    start_store: Start, connect: Connect, message: Message
) -> None:
    store = start_store()
    client = connect(store)
    client.put(page_name(2), payload(2), 8)
    async with peer(store) as link:
        assert await offer(link, 1, 2) == [0]
        claimed = message.payload_bytes if isinstance(message, Segments) else 0
        with contextlib.suppress(Lost):  # it may be cut off before it is through
            await link.send(message, [memoryview(bytes(min(max(0, claimed), 1 << 16)))])
        await ended(link)
    await until_on_thread(lambda: is_idle(client))
    assert client.describe()["links_crashed"] == 0
    client.put(page_name(3), payload(3), 8)
    assert client.get(page_name(3)) == payload(3)


async def test_a_format_that_the_store_cannot_hold_is_refused_with_a_reason(start_store: Start) -> None:
    big = PageFormat(layers=1000, kv_heads=8, head_dim=128, dtype="float32", page_tokens=32)
    odd = PageFormat(layers=1, kv_heads=1, head_dim=1, dtype="int3", page_tokens=1)
    async with peer(start_store()) as link:
        for format in (big, odd):
            await link.send(PushOpen(transfer="t", format=format, names=[page_name(1)], total_tokens=1))
            answer = await link.recv()
            assert isinstance(answer, PushClosed)
            assert not answer.complete
            assert "fit" in answer.reason or "format" in answer.reason


@pytest.mark.parametrize("data", [b"\0" * 100, b"\xff" * 100, b"GET / HTTP/1.0\r\n\r\n", os.urandom(5000)])
async def test_garbage_on_both_sockets_harms_nobody(start_store: Start, connect: Connect, data: bytes) -> None:
    store = start_store()
    client = connect(store)
    host, port = store.address.split(":")
    for address, family in ((str(store.socket_path), socket.AF_UNIX), ((host, int(port)), socket.AF_INET)):
        with socket.socket(family) as raw:
            raw.connect(address)
            with contextlib.suppress(OSError):
                raw.sendall(data)
                raw.recv(100)
    async with peer(store) as link:
        link._sock.setblocking(True)
        link._sock.sendall(data)
        link._sock.setblocking(False)
        link._sock.shutdown(socket.SHUT_WR)
        await ended(link)
    client.put(page_name(1), payload(1), 8)
    assert client.get(page_name(1)) == payload(1)


async def test_a_frame_over_the_limit_ends_the_link_before_it_is_read(start_store: Start) -> None:
    async with peer(start_store()) as link:
        link._sock.send((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        await ended(link)


async def test_a_peer_with_the_wrong_key_is_refused(start_store: Start) -> None:
    store = start_store()
    with pytest.raises(Refused, match="key"):
        await connect(store.address, b"x" * 32, sender="thief", purpose="peer")
    for address, purpose in ((store.address, "client"), (store.socket_path, "peer")):
        with pytest.raises(Refused, match=purpose):
            await connect(address, KEY, sender="me", purpose=purpose)


# ---------------------------------------------------------------- clients


@contextlib.asynccontextmanager
async def raw_client(store: StoreProcess) -> AsyncIterator[Channel]:
    link = await connect(store.socket_path, KEY, sender="rogue", purpose="client")
    try:
        await link.send(Attach(id=0, owner="rogue/1", format=FORMAT))
        assert isinstance(await link.recv(), Attached)
        yield link
    finally:
        link.close()


BAD_FROM_CLIENT: list[Message] = [
    Attach(id=1, owner="rogue/2", format=FORMAT),
    Attached(id=1, epoch=1, slots=1, store="x", advertised="y"),
    PushClosed(transfer="t", complete=True),
    Announce(pages=[NewPage(PageName(b"x"), SlotRef(0, 1), 8)]),
    Announce(pages=[NewPage(page_name(1), SlotRef(0, 1), 9)]),
    Announce(pages=[NewPage(page_name(1), SlotRef(0, 1), 0)]),
]


@pytest.mark.parametrize("message", BAD_FROM_CLIENT, ids=repr)
async def test_a_client_that_breaks_the_rules_loses_its_link(
    start_store: Start, connect: Connect, message: Message
) -> None:
    store = start_store()
    client = connect(store)
    async with raw_client(store) as link:
        await link.send(message)
        await ended(link)
    assert client.describe()["links_crashed"] == 0


async def test_a_slot_that_was_not_granted_is_refused_and_counted(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    client.put(page_name(1), payload(1), 8)
    held = client.acquire("l", [page_name(1)], 10).result(PATIENCE_S).pages[0]
    assert held is not None
    rogue = [held.slot, SlotRef(held.slot.slot, held.slot.generation + 1), SlotRef(-1, 0), SlotRef(1 << 40, 5)]
    async with raw_client(store) as link:
        await link.send(Announce(pages=[NewPage(page_name(2), ref, 8) for ref in rogue]))
        await link.send(Describe(id=1))
        answer = await link.recv()
        assert isinstance(answer, Described)
        assert answer.counts["stale_refs"] == 4
    assert client.get(page_name(1)) == payload(1)


async def test_a_greedy_client_gets_no_more_than_there_is(start_store: Start, connect: Connect) -> None:
    store = start_store(pages=8)
    client = connect(store)
    client.put(page_name(1), payload(1), 8)
    client.acquire("l", [page_name(1)], 60).result(PATIENCE_S)
    async with raw_client(store) as link:
        for count in (-5, 1 << 40):
            await link.send(Allocate(id=1, count=count))
            answer = await link.recv()
            assert isinstance(answer, Granted)
            assert len(answer.slots) == (7 if count > 0 else 0)
    assert client.get(page_name(1)) == payload(1)
    await until_on_thread(lambda: client.describe()["slots_occupied"] == 1)


async def test_a_client_that_does_not_read_its_answers_blocks_only_itself(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    names = [page_name(number) for number in range(100_000)]
    ask = encode(Acquire(id=1, lease="l", names=names, ttl_s=1.0))
    async with raw_client(store) as link:
        with contextlib.suppress(BlockingIOError):
            while True:
                link._sock.send(ask)
        for number in range(20):
            client.put(page_name(number), payload(number), 8)
            assert client.get(page_name(number)) == payload(number)


# ---------------------------------------------------------------- a peer that receives


BIG = PageFormat(layers=4, kv_heads=8, head_dim=128, dtype="float32", page_tokens=32)


async def test_a_receiver_that_stops_reading_in_the_middle_costs_only_its_own_push(
    start_store: Start, connect: Connect
) -> None:
    asked = asyncio.Event()

    async def want_everything_then_sleep(link: Channel) -> None:
        assert isinstance(await link.recv(), PushOpen)
        offered = await link.recv()
        assert isinstance(offered, PushPages)
        await link.send(PushWanted(transfer=offered.transfer, indices=offered.indices))
        asked.set()
        await asyncio.sleep(600)

    store = start_store(pages=10_000, toml="store.stalled_push_s = 2")
    writer = connect(store, "p/1", format=BIG)
    numbers = range(48)
    for number in numbers:
        writer.put(page_name(number), payload(number, 32, BIG), 32)
    sock = bind_tcp("127.0.0.1", 0)
    host, port = sock.getsockname()
    listener = Listener(sock, KEY, receiver="deaf", purposes={"peer"}, serve=want_everything_then_sleep)
    task = asyncio.create_task(listener.run())
    names = [page_name(number) for number in numbers]
    writer.open_transfer("t", names, 32 * len(names), f"{host}:{port}")
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
    assert (await asyncio.to_thread(writer.describe))["pages_pinned"] > 0
    assert await asyncio.to_thread(writer.get, page_name(3)) == payload(3, 32, BIG)
    await until_on_thread(lambda: writer.describe()["pushes_failed"] == 1)
    counts = writer.describe()
    assert counts["bytes_pushed"] < 48 * BIG.page_bytes
    assert (counts["pages_pinned"], counts["transfers_open"]) == (0, 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


SLOW_MB_S = 0.5
"""Seconds that a slow reader takes for a megabyte at least."""


async def _want_everything_and_read_slowly(link: Channel) -> None:
    """At most 2 MB a second."""
    room = memoryview(bytearray(1 << 20))
    while True:
        match await link.recv():
            case PushPages() as offered:
                await link.send(PushWanted(transfer=offered.transfer, indices=offered.indices))
            case Segments() as segments:
                for start in range(0, segments.payload_bytes, len(room)):
                    await link.recv_into([room[: segments.payload_bytes - start]])
                    await asyncio.sleep(SLOW_MB_S)
                await link.send(Taken(serial=segments.serial))
            case _:
                pass


async def test_an_offer_waits_for_its_answer_while_bytes_of_another_push_move_ahead_of_it(
    start_store: Start, connect: Connect
) -> None:
    # A busy machine may make every megabyte take several times as long, and the two others wait far longer yet.
    store = start_store(pages=10_000, toml=f"store.stalled_push_s = {6 * SLOW_MB_S}")
    writer = connect(store, "p/1", format=BIG)
    for number in range(13):
        writer.put(page_name(number), payload(number, 32, BIG), 32)
    sock = bind_tcp("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # what is on its way is on the sender's side
    host, port = sock.getsockname()
    listener = Listener(sock, KEY, receiver="slow", purposes={"peer"}, serve=_want_everything_and_read_slowly)
    task = asyncio.create_task(listener.run())
    writer.open_transfer("t1", [page_name(number) for number in range(12)], 32 * 12, f"{host}:{port}")
    await until_on_thread(lambda: writer.describe()["bytes_pushed"] > 0)
    writer.open_transfer("t2", [page_name(12)], 32, f"{host}:{port}")
    await until_on_thread(lambda: writer.describe()["transfers_open"] == 0)
    counts = writer.describe()
    assert (counts["pushes_failed"], counts["bytes_pushed"]) == (0, 13 * BIG.page_bytes)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "answer",
    [PushWanted(transfer="t", indices=[5]), PushWanted(transfer="t", indices=[-1]), Describe(id=1)],
    ids=repr,
)
async def test_a_receiver_that_answers_nonsense_ends_the_push(
    start_store: Start, connect: Connect, answer: Message
) -> None:
    async def serve(link: Channel) -> None:
        while True:
            if isinstance(await link.recv(), PushPages):
                await link.send(answer)

    writer = connect(start_store(), "p/1")
    writer.put(page_name(1), payload(1), 8)
    sock = bind_tcp("127.0.0.1", 0)
    host, port = sock.getsockname()
    task = asyncio.create_task(Listener(sock, KEY, receiver="odd", purposes={"peer"}, serve=serve).run())
    writer.open_transfer("t", [page_name(1)], 8, f"{host}:{port}")
    await until_on_thread(lambda: writer.describe()["pushes_failed"] == 1)
    assert writer.describe()["pages_pinned"] == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
