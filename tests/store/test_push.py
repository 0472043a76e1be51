"""Two stores in two processes: what one has, the other gets, page by page and layer by layer."""

from __future__ import annotations

import signal
from collections.abc import Callable

import numpy as np
import pytest

from kvrelay.protocol.client import NewPage
from kvrelay.store.arena import checksums
from kvrelay.store.client import StoreClient
from kvrelay.store.peers import MAX_PUSHED_PAGES
from kvrelay.types import Shard, SlotRef, Stage
from tests.patience import LEEWAY, PATIENCE_S, RECOVERED_S, wait_until
from tests.store.conftest import FORMAT, StoreProcess, page_name, payload
from tests.store.test_client import is_idle, publish, take

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]
LAST_TOKENS = 3


def tokens_of(number: int, count: int) -> int:
    return LAST_TOKENS if number == count - 1 else 8


def total(count: int) -> int:
    return 8 * (count - 1) + LAST_TOKENS


def put_all(client: StoreClient, count: int) -> None:
    for number in range(count):
        tokens = tokens_of(number, count)
        client.put(page_name(number), payload(number, tokens), tokens)


def has_all(client: StoreClient, count: int) -> bool:
    return all(client.exists([page_name(number) for number in range(count)]))


def check_all(client: StoreClient, count: int) -> None:
    for number in range(count):
        assert client.get(page_name(number)) == payload(number, tokens_of(number, count))


class Pair:
    """Store of P, store of D, and a client at each."""

    def __init__(self, start: Start, connect: Connect, pages: int = 64, toml: str = "") -> None:
        self.p, self.d = start("store-p", pages, toml), start("store-d", pages, toml)
        self.writer = connect(self.p, "p/1", grant_slots=16)
        self.reader = connect(self.d, "d/1", grant_slots=0)

    def open(self, transfer: str, count: int) -> None:
        names = [page_name(number) for number in range(count)]
        self.writer.open_transfer(transfer, names, total(count), self.d.address)


@pytest.fixture
def pair(start_store: Start, connect: Connect) -> Pair:
    return Pair(start_store, connect)


def test_pages_that_are_here_already_are_pushed_at_once(pair: Pair) -> None:
    put_all(pair.writer, 10)
    pair.open("t", 10)
    wait_until(lambda: has_all(pair.reader, 10))
    check_all(pair.reader, 10)
    size = sum(len(payload(0, tokens_of(number, 10))) for number in range(10))
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    wait_until(lambda: is_idle(pair.reader) and pair.writer.describe()["transfers_open"] == 0)
    assert pair.writer.describe()["bytes_pushed"] == size == pair.reader.describe()["bytes_received"]
    assert pair.writer.describe()["pages_pinned"] == 0


def test_what_the_other_side_has_does_not_travel_again(pair: Pair) -> None:
    put_all(pair.writer, 6)
    pair.open("t1", 6)
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    moved = pair.reader.describe()["bytes_received"]
    pair.open("t2", 6)
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 2)
    assert pair.reader.describe()["bytes_received"] == moved


def test_only_the_pages_that_are_lacking_travel(pair: Pair) -> None:
    put_all(pair.writer, 6)
    for number in (0, 1, 3):
        pair.reader.put(page_name(number), payload(number), 8)
    assert pair.reader.exists([page_name(3)]) == [True]
    pair.open("t", 6)
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    check_all(pair.reader, 6)
    assert pair.reader.describe()["pages_received"] == 3


def test_layers_are_forwarded_while_the_page_is_still_being_written(pair: Pair) -> None:
    pair.open("t", 2)
    first, second = take(pair.writer, 2)
    pair.writer.announce([NewPage(page_name(0), first, 8)], "t")
    publish(pair.writer, first, payload(0), range(1))
    pair.writer.ring()
    held = None

    def arriving() -> bool:
        nonlocal held
        answer = pair.reader.acquire("l", [page_name(0), page_name(1)], 60, ["t"]).result(PATIENCE_S)
        assert answer.waiting
        held = answer.pages[0]
        return held is not None

    wait_until(arriving)
    assert held is not None
    assert not held.complete
    arena = pair.reader.arena
    assert arena is not None
    where = np.array([held.slot.slot]), np.array([held.slot.generation])
    wait_until(lambda: arena.ready(*where, 0)[0])
    assert not arena.ready(*where, 1)[0]
    publish(pair.writer, first, payload(0), range(1, FORMAT.layers))
    pair.writer.announce([NewPage(page_name(1), second, LAST_TOKENS)], "t")
    publish(pair.writer, second, payload(1, LAST_TOKENS), range(FORMAT.layers))
    pair.writer.ring()
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    check_all(pair.reader, 2)
    pair.reader.release("l")
    wait_until(lambda: is_idle(pair.reader))


def test_a_transfer_that_nobody_knows_yet_is_worth_waiting_for(pair: Pair) -> None:
    ask = pair.reader.acquire
    assert ask("l", [page_name(0)], 5, ["later"]).result(PATIENCE_S).waiting
    assert not ask("l", [page_name(0)], 5).result(PATIENCE_S).waiting
    put_all(pair.writer, 2)
    pair.open("later", 2)
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    assert not ask("l", [page_name(99)], 5, ["later"]).result(PATIENCE_S).waiting


def test_many_pushes_share_the_link(pair: Pair) -> None:
    put_all(pair.writer, 40)
    for number in range(1, 41):
        pair.open(f"t{number}", 40)
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 40)
    check_all(pair.reader, 40)
    assert pair.reader.describe()["pages_received"] == 40
    wait_until(lambda: is_idle(pair.reader) and pair.writer.describe()["pages_pinned"] == 0)


def test_a_flipped_bit_at_the_sender_is_a_miss_at_the_receiver(pair: Pair) -> None:
    put_all(pair.writer, 3)
    held = pair.writer.acquire("l", [page_name(1)], 5).result(PATIENCE_S).pages[0]
    assert held is not None
    assert pair.writer.arena is not None
    pair.writer.arena.segment(held.slot.slot, 2, 8)[5] ^= 4
    pair.open("t", 3)
    wait_until(lambda: pair.reader.describe()["transfers_failed"] == 1)
    assert pair.reader.exists([page_name(number) for number in range(3)]) == [True, False, True]
    counts = pair.reader.describe()
    assert (counts["checksum_failures"], counts["pages_failed"]) == (1, 1)
    assert not pair.reader.acquire("m", [page_name(1)], 5, ["t"]).result(PATIENCE_S).waiting
    wait_until(lambda: is_idle(pair.reader))


def test_a_sender_forgets_a_page_that_its_peer_found_damaged(pair: Pair) -> None:
    put_all(pair.writer, 3)
    (held,) = pair.writer.acquire("l", [page_name(1)], 5).result(PATIENCE_S).pages
    assert held is not None
    assert pair.writer.arena is not None
    pair.writer.arena.segment(held.slot.slot, 0, 8)[0] ^= 1
    pair.writer.open_transfer("t1", [page_name(n) for n in range(3)], total(3), pair.d.address)
    wait_until(lambda: pair.writer.describe()["pages_damaged"] == 1)
    pair.writer.release("l")
    pair.writer.put(page_name(1), payload(1), 8)
    pair.open("t2", 3)
    wait_until(lambda: has_all(pair.reader, 3))
    check_all(pair.reader, 3)


def test_a_sender_that_dies_in_the_middle_fails_what_was_on_its_way(pair: Pair) -> None:
    pair.open("t", 2)
    (ref,) = take(pair.writer, 1)
    pair.writer.announce([NewPage(page_name(0), ref, 8)], "t")
    publish(pair.writer, ref, payload(0), range(1))
    pair.writer.ring()
    held: list[SlotRef] = []

    def arriving() -> bool:
        page = pair.reader.acquire("l", [page_name(0)], 60, ["t"]).result(PATIENCE_S).pages[0]
        held.extend([page.slot] if page else [])
        return page is not None

    wait_until(arriving)
    pair.p.kill()
    arena = pair.reader.arena
    assert arena is not None
    wait_until(lambda: arena.is_failed(held[0]), within_s=LEEWAY * RECOVERED_S)
    answer = pair.reader.acquire("m", [page_name(0)], 60, ["t"]).result(PATIENCE_S)
    assert (answer.pages, answer.waiting) == ([None], False)
    pair.reader.release("l")
    wait_until(lambda: is_idle(pair.reader))
    assert not arena.is_current(held[0])


def test_a_receiver_that_dies_fails_the_push_and_the_next_one_finds_its_successor(pair: Pair) -> None:
    put_all(pair.writer, 4)
    pair.open("t1", 4)
    wait_until(lambda: has_all(pair.reader, 4))
    (ref,) = take(pair.writer, 1)
    pair.writer.open_transfer("t2", [page_name(50)], 8, pair.d.address)
    pair.writer.announce([NewPage(page_name(50), ref, 8)], "t2")
    wait_until(lambda: pair.reader.describe()["transfers_open"] == 1)
    pair.d.kill()
    wait_until(lambda: pair.writer.describe()["pushes_failed"] == 1, within_s=LEEWAY * RECOVERED_S)
    assert pair.writer.describe()["pages_pinned"] == 0
    wait_until(lambda: pair.reader.arena is None)
    pair.d.start()
    pair.open("t3", 4)
    assert pair.reader.wait_attached(PATIENCE_S)
    wait_until(lambda: has_all(pair.reader, 4))
    check_all(pair.reader, 4)


@pytest.mark.slow
def test_a_peer_that_stops_is_given_up_and_taken_back_when_it_goes_on(start_store: Start, connect: Connect) -> None:
    pair = Pair(start_store, connect, toml="store.stalled_push_s = 2")
    put_all(pair.writer, 4)
    pair.writer.put(page_name(50), payload(50), 8)
    pair.writer.open_transfer("t1", [page_name(50)], 8, pair.d.address)
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    pair.d.signal(signal.SIGSTOP)
    pair.open("t2", 4)
    wait_until(lambda: pair.writer.describe()["pushes_failed"] == 1, within_s=LEEWAY * RECOVERED_S)
    assert pair.writer.describe()["pages_pinned"] == 0
    pair.d.signal(signal.SIGCONT)
    pair.open("t3", 4)
    wait_until(lambda: has_all(pair.reader, 4))
    wait_until(lambda: is_idle(pair.reader))


def test_a_final_transfer_sends_what_is_here_and_ends(start_store: Start, connect: Connect) -> None:
    """What was generated goes home after the fact: pages that were evicted meanwhile must not keep it open."""
    pair = Pair(start_store, connect)
    for number in (0, 1):
        pair.writer.put(page_name(number), payload(number), 8)
    names = [page_name(0), page_name(77), page_name(1)]
    pair.writer.open_transfer("home", names, 24, pair.d.address, final=True)
    wait_until(lambda: pair.reader.exists(names) == [True, False, True])
    wait_until(lambda: is_idle(pair.reader))
    wait_until(lambda: pair.writer.describe()["pushes_open"] == pair.writer.describe()["transfers_open"] == 0)


def test_a_final_transfer_of_nothing_ends_too(start_store: Start, connect: Connect) -> None:
    pair = Pair(start_store, connect)
    pair.writer.open_transfer("home", [page_name(77)], 8, pair.d.address, final=True)
    wait_until(lambda: pair.reader.describe()["transfers_failed"] == 1)
    wait_until(lambda: pair.writer.describe()["pushes_open"] == pair.writer.describe()["transfers_open"] == 0)


def test_a_lost_writer_fails_its_transfer_on_both_sides(pair: Pair) -> None:
    pair.open("t", 3)
    (ref,) = take(pair.writer, 1)
    pair.writer.announce([NewPage(page_name(0), ref, 8)], "t")
    wait_until(lambda: pair.reader.acquire("l", [page_name(0)], 60, ["t"]).result(PATIENCE_S).pages[0])
    pair.writer.close()
    wait_until(lambda: pair.reader.describe()["transfers_failed"] == 1, within_s=LEEWAY * RECOVERED_S)
    pair.reader.release("l")
    wait_until(lambda: is_idle(pair.reader))


def test_a_milestone_of_failure_ends_the_push(pair: Pair) -> None:
    pair.open("t", 3)
    wait_until(lambda: pair.reader.describe()["transfers_open"] == 1)
    pair.writer.milestone("t", Stage.FAILED, reason="aborted")
    wait_until(lambda: pair.reader.describe()["transfers_failed"] == 1)
    wait_until(lambda: pair.writer.describe()["pushes_open"] == 0)


def test_a_receiver_without_room_takes_what_fits_and_says_that_the_rest_will_not_come(
    start_store: Start, connect: Connect
) -> None:
    p, d = start_store("store-p", 16), start_store("store-d", 4)
    writer, reader = connect(p, "p/1"), connect(d, "d/1")
    for number in (90, 91, 92):
        reader.put(page_name(number), payload(number), 8)
    reader.acquire("l", [page_name(90), page_name(91), page_name(92)], 60).result(PATIENCE_S)
    put_all(writer, 3)
    writer.open_transfer("t", [page_name(number) for number in range(3)], total(3), d.address)
    wait_until(lambda: reader.describe()["transfers_failed"] == 1)
    assert sum(reader.exists([page_name(number) for number in range(3)])) == 1
    assert not reader.acquire("m", [page_name(2)], 5, ["t"]).result(PATIENCE_S).waiting
    wait_until(lambda: writer.describe()["pages_pinned"] == 0)


@pytest.mark.parametrize("address", ["10.1.2.3:80", "192.0.2.1:9", "example.com:80", "nonsense", "127.0.0.1:1"])
def test_an_address_outside_the_peer_list_is_never_dialled(start_store: Start, connect: Connect, address: str) -> None:
    writer = connect(start_store("store-p"), "p/1")
    writer.put(page_name(0), payload(0), 8)
    writer.open_transfer("t", [page_name(0)], 8, address)
    expected = 1 if address == "127.0.0.1:1" else 0
    wait_until(lambda: writer.describe()["pushes_failed"] == expected)
    counts = writer.describe()
    assert (counts["pushes_open"], counts["transfers_open"]) == (0, 0)
    assert writer.get(page_name(0)) == payload(0)


def test_a_transfer_that_stays_here_arrives_when_its_last_page_is_whole(start_store: Start, connect: Connect) -> None:
    store = start_store()
    writer = connect(store, "p/1", grant_slots=4)
    for transfer, push_to in (("none", None), ("self", store.address)):
        writer.open_transfer(transfer, [page_name(0), page_name(1)], 16, push_to)
    assert writer.describe()["transfers_open"] == 2
    for number in (0, 1):
        writer.put(page_name(number), payload(number), 8)
    assert writer.describe()["transfers_arrived"] == 2
    assert writer.describe()["bytes_pushed"] == 0


@pytest.mark.parametrize(("count", "tokens"), [(2, 8), (1, 9), (0, 0), (1, 0)])
def test_names_that_do_not_fit_the_prompt_end_that_link_or_transfer_alone(
    start_store: Start, connect: Connect, count: int, tokens: int
) -> None:
    client = connect(start_store())
    client.open_transfer("t", [page_name(number) for number in range(count)], tokens, None)
    assert client.describe()["transfers_open"] == 0
    client.put(page_name(1), payload(1), 8)
    assert client.get(page_name(1)) == payload(1)


def publish_shard(client: StoreClient, slot: SlotRef, data: bytes, shard: Shard) -> None:
    """Write every layer's heads of ``shard``, as one rank of a tensor-parallel engine does."""
    arena = client.arena
    assert arena is not None
    size = FORMAT.segment_bytes // shard.of
    for layer in range(FORMAT.layers):
        start = layer * FORMAT.segment_bytes + shard.number * size
        part = data[start : start + size]
        arena.segment(slot.slot, layer, FORMAT.page_tokens)[shard.number * size :][:size] = part
        arena.publish(slot, layer, checksums(memoryview(part), size)[0], shard)


def test_pages_of_several_writers_travel_whole_and_beside_those_of_one(pair: Pair) -> None:
    shared, own = take(pair.writer, 2)
    pair.writer.announce([NewPage(page_name(0), shared, 8, shards=2), NewPage(page_name(1), own, LAST_TOKENS)])
    publish(pair.writer, own, payload(1, LAST_TOKENS), range(FORMAT.layers))
    publish_shard(pair.writer, shared, payload(0), Shard(1, 2))
    pair.open("t", 2)
    wait_until(lambda: pair.reader.exists([page_name(0), page_name(1)]) == [False, True])
    publish_shard(pair.writer, shared, payload(0), Shard(0, 2))
    pair.writer.ring()
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    check_all(pair.reader, 2)
    held = pair.reader.acquire("l", [page_name(0)], 10).result(PATIENCE_S).pages[0]
    assert held is not None
    assert held.shards == 2
    pair.reader.release("l")


@pytest.mark.parametrize("shards", [0, 3, 4, -1])
def test_writers_that_cannot_share_the_heads_are_refused(pair: Pair, shards: int) -> None:
    (slot,) = take(pair.writer, 1)
    pair.writer.announce([NewPage(page_name(0), slot, 8, shards=shards)])
    wait_until(lambda: pair.writer.problem != "" or pair.writer.arena is None or not pair.writer.arena.is_current(slot))


def test_a_transfer_too_long_for_one_message_fails_alone(pair: Pair) -> None:
    put_all(pair.writer, 2)
    names = [page_name(number) for number in range(MAX_PUSHED_PAGES + 1)]
    pair.writer.open_transfer("long", names, len(names) * 8, pair.d.address)
    pair.open("t", 2)
    wait_until(lambda: pair.reader.describe()["transfers_arrived"] == 1)
    check_all(pair.reader, 2)
