"""A client and its store, both real: put, get, leases, grants, and every way in which either goes away."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvrelay.errors import KvrelayError, Lost, Overloaded, Refused
from kvrelay.protocol.client import Acquired, Describe, Described, Granted, NewPage
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.store.attachment import Attachment
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, SlotRef
from tests.patience import PATIENCE_S, wait_until
from tests.store.conftest import FORMAT, KEY, StoreProcess, page_name, payload

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]


def publish(client: StoreClient, ref: SlotRef, data: bytes, layers: range) -> None:
    arena = client.arena
    assert arena is not None
    size = len(data) // FORMAT.layers
    for layer in layers:
        part = data[layer * size : (layer + 1) * size]
        arena.segment(ref.slot, layer, len(part) // FORMAT.token_layer_bytes)[:] = part
        arena.publish(ref, layer, xxhash.xxh3_64_intdigest(part))


def take(client: StoreClient, count: int) -> list[SlotRef]:
    refs: list[SlotRef] = []

    def enough() -> bool:
        refs.extend(client.take_slots(count - len(refs)))
        return len(refs) == count

    wait_until(enough)
    return refs


def is_idle(client: StoreClient) -> bool:
    counts = client.describe()
    gauges = ("pages_pinned", "leases_open", "transfers_open", "pages_filling", "slots_failed", "slots_granted")
    return not any(counts[name] for name in gauges)


def test_what_was_put_is_what_comes_back(start_store: Start, connect: Connect) -> None:
    client = connect(start_store())
    client.put(page_name(1), payload(1), 8)
    client.put(page_name(2), payload(2, tokens=3), 3)
    assert client.exists([page_name(2), page_name(9), page_name(1)]) == [True, False, True]
    assert client.get(page_name(1)) == payload(1)
    assert client.get(page_name(2)) == payload(2, tokens=3)
    assert client.get(page_name(9)) is None
    wait_until(lambda: is_idle(client))
    assert client.describe()["pages_used"] == 2


def test_another_process_reads_what_one_wrote(start_store: Start, connect: Connect) -> None:
    store = start_store()
    writer, reader = connect(store, "a/1"), connect(store, "b/1")
    writer.put(page_name(1), payload(1), 8)
    assert reader.get(page_name(1)) == payload(1)


def test_a_payload_of_the_wrong_length_is_refused_and_costs_no_slot(start_store: Start, connect: Connect) -> None:
    client = connect(start_store(pages=1))
    for data, tokens in ((payload(1)[:-1], 8), (payload(1), 7), (b"", 0), (payload(1) * 2, 16)):
        with pytest.raises(ValueError, match="bytes"):
            client.put(page_name(1), data, tokens)
    client.put(page_name(1), payload(1), 8)
    assert client.get(page_name(1)) == payload(1)


def test_a_flipped_bit_is_a_miss_and_counted(start_store: Start, connect: Connect) -> None:
    client = connect(start_store())
    client.put(page_name(1), payload(1), 8)
    held = client.acquire("l", [page_name(1)], 5).result(PATIENCE_S).pages[0]
    assert held is not None
    assert client.arena is not None
    client.arena.segment(held.slot.slot, 1, 8)[100] ^= 1
    assert client.get(page_name(1)) is None
    wait_until(lambda: client.describe()["read_bad_checksum"] == 1)
    client.release("l")
    wait_until(lambda: client.exists([page_name(1)]) == [False])


def test_many_pages_go_in_and_come_out_with_one_question(start_store: Start, connect: Connect) -> None:
    client = connect(start_store(), grant_slots=4)
    client.put_many([(page_name(number), payload(number), 8) for number in range(20)])
    got = client.get_many([page_name(number) for number in range(21)])
    assert got == [*(payload(number) for number in range(20)), None]
    assert client.get_many([]) == []
    target = bytearray(2 * len(payload(1)))
    views = [memoryview(target)[: len(target) // 2], memoryview(target)[len(target) // 2 :]]
    assert client.get_into([page_name(3), page_name(99)], views) == [True, False]
    assert target == payload(3) + bytes(len(payload(3)))
    with pytest.raises(ValueError, match="structure"):
        client.get_into([page_name(3)], [views[0][:-1]])
    wait_until(lambda: client.describe()["pages_pinned"] == 0)


def test_a_damaged_page_that_a_reader_suspects_is_forgotten_and_a_sound_one_stays(
    start_store: Start, connect: Connect
) -> None:
    client = connect(start_store())
    for number in (1, 2):
        client.put(page_name(number), payload(number), 8)
    held = client.acquire("l", [page_name(1), page_name(2)], 60).result(PATIENCE_S).pages
    slots = [page.slot for page in held if page is not None]
    assert client.arena is not None
    client.arena.segment(slots[0].slot, 0, 8)[0] ^= 1
    client.suspect([*slots, SlotRef(slots[0].slot, 5), SlotRef(-1, 5)])
    wait_until(lambda: client.exists([page_name(1), page_name(2)]) == [False, True])
    assert client.arena.is_current(slots[0]), "pinned"
    client.release("l")
    wait_until(lambda: is_idle(client))
    assert client.describe()["pages_damaged"] == 1


def test_pages_arrive_layer_by_layer_for_whoever_acquired_them(start_store: Start, connect: Connect) -> None:
    store = start_store()
    writer, reader = connect(store, "p/1", grant_slots=4), connect(store, "d/1")
    (ref,) = take(writer, 1)
    writer.announce([NewPage(page_name(1), ref, 8)])
    held = None

    def arriving() -> bool:
        nonlocal held
        held = reader.acquire("l", [page_name(1)], 5).result(PATIENCE_S).pages[0]
        return held is not None

    wait_until(arriving)
    assert held is not None
    assert (held.slot, held.tokens, held.complete) == (ref, 8, False)
    assert reader.arena is not None
    slots, generations = np.array([ref.slot]), np.array([ref.generation])
    for layer in range(FORMAT.layers):
        assert not reader.arena.ready(slots, generations, layer)[0]
        publish(writer, ref, payload(1), range(layer, layer + 1))
        writer.ring()
        assert reader.arena.ready(slots, generations, layer)[0]
    wait_until(lambda: reader.exists([page_name(1)]) == [True])
    assert reader.get(page_name(1)) == payload(1)


def test_the_doorbell_alone_completes_a_page(start_store: Start, connect: Connect) -> None:
    client = connect(start_store(), grant_slots=2)
    (ref,) = take(client, 1)
    client.announce([NewPage(page_name(1), ref, 8)])
    wait_until(lambda: client.describe()["pages_filling"] == 1)
    publish(client, ref, payload(1), range(FORMAT.layers))
    client.ring()
    wait_until(lambda: client.describe()["pages_put"] == 1)


def test_grants_are_refilled_in_the_background(start_store: Start, connect: Connect) -> None:
    client = connect(start_store(), grant_slots=4)
    refs = take(client, 12)
    assert len({ref.slot for ref in refs}) == 12
    client.give_back(refs)
    wait_until(lambda: client.describe()["slots_granted"] >= 12)


def test_slots_that_are_of_no_use_without_the_others_are_given_back_also_those_that_come_late(
    start_store: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(start_store(), grant_slots=3)
    late, *had = take(client, 3)
    client.give_back(had)
    unanswered: Future[Granted] = Future()
    monkeypatch.setattr("kvrelay.store.bulk.ANSWER_S", 0.01)
    monkeypatch.setattr(client._tether, "ask", lambda build, kind: unanswered)
    with pytest.raises(Lost):
        client.put_many([(page_name(number), payload(number), 8) for number in range(60)])
    assert set(had) <= set(client.take_slots(60))
    unanswered.set_result(Granted(id=0, slots=[late]))
    assert late in client.take_slots(60)


def test_a_lease_pins_until_it_is_released_or_runs_out(start_store: Start, connect: Connect) -> None:
    client = connect(start_store(pages=2))
    for number in (1, 2):
        client.put(page_name(number), payload(number), 8)
    client.acquire("kept", [page_name(1)], 60).result(PATIENCE_S)
    client.acquire("short", [page_name(2)], 60).result(PATIENCE_S)
    with pytest.raises(Overloaded, match="pinned"):
        client.put(page_name(3), payload(3), 8)
    client.acquire("short", [page_name(2)], 0.3).result(PATIENCE_S)
    wait_until(lambda: client.describe()["leases_open"] == 1)
    client.put(page_name(3), payload(3), 8)
    assert client.exists([page_name(1), page_name(2), page_name(3)]) == [True, False, True]
    client.release("kept")
    client.put(page_name(4), payload(4), 8)
    assert client.exists([page_name(1)]) == [False]


def test_nobody_can_release_another_owners_lease(start_store: Start, connect: Connect) -> None:
    store = start_store()
    ours, theirs = connect(store, "a/1"), connect(store, "b/1")
    ours.put(page_name(1), payload(1), 8)
    ours.acquire("l", [page_name(1)], 60).result(PATIENCE_S)
    theirs.release("l")
    assert theirs.describe()["pages_pinned"] == 1


def test_what_a_link_opened_ends_with_it_though_its_owner_has_another_one(start_store: Start, connect: Connect) -> None:
    store = start_store()
    first, second = connect(store, "w/1"), connect(store, "w/1")
    first.put_many([(page_name(number), payload(number), 8) for number in (1, 2)])
    for client, number in ((first, 1), (second, 2)):
        client.acquire("l", [page_name(number)], 60).result(PATIENCE_S)
        client.open_transfer(f"t{number}", [page_name(90 + number)], 8, None)
        assert client.describe()["transfers_open"] == number
    first.close()
    wait_until(lambda: second.describe()["transfers_failed"] == 1)
    counts = second.describe()
    gauges = ("owners", "owner_links", "owners_lost", "leases_open", "pages_pinned", "transfers_open")
    assert [counts[name] for name in gauges] == [1, 1, 0, 1, 1, 1]
    assert second.acquire("m", [page_name(92)], 5, ["t2"]).result(PATIENCE_S).waiting
    other = connect(store, "x/1")
    second.close()
    wait_until(lambda: other.describe()["owners_lost"] == 1)
    assert [other.describe()[name] for name in gauges] == [1, 1, 1, 0, 0, 0]


def test_a_killed_store_is_a_miss_and_a_new_one_is_found(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store, grant_slots=2)
    client.put(page_name(1), payload(1), 8)
    old_arena, old_refs = client.arena, take(client, 1)
    assert old_arena is not None
    store.kill()
    wait_until(lambda: client.arena is None)
    wait_until(lambda: client.take_slots(1) == [])
    with pytest.raises(Lost):
        client.exists([page_name(1)])
    with pytest.raises(Lost):
        client.acquire("l", [page_name(1)], 5).result(PATIENCE_S)
    client.ring()
    old_arena.segment(0, 0, 8)[0] = 1
    store.start()
    assert client.wait_attached(PATIENCE_S)
    assert client.arena is not None
    assert client.arena.epoch != old_arena.epoch
    assert not client.arena.is_current(old_refs[0])
    assert client.get(page_name(1)) is None
    client.announce([NewPage(page_name(5), old_refs[0], 8)])
    wait_until(lambda: client.describe()["stale_refs"] == 1)
    client.put(page_name(1), payload(1), 8)
    assert client.get(page_name(1)) == payload(1)


async def test_a_request_on_a_link_that_is_closed_is_lost_at_once(start_store: Start) -> None:
    attachment = await Attachment.open(start_store().socket_path, KEY, "w/1", FORMAT)
    for after in (False, True):
        if after:
            attachment.close()
        answer: Future[Message] = Future()
        attachment.request(lambda id: Describe(id=id), Described, answer)
        if not after:
            attachment.close()
        with pytest.raises(Lost):
            answer.result(timeout=0)


def test_every_request_is_answered_while_a_client_closes(start_store: Start, connect: Connect) -> None:
    store = start_store()
    for number in range(8):
        client = connect(store, f"w/{number}")
        answers: list[Future[Acquired]] = []

        def ask(client: StoreClient = client, answers: list[Future[Acquired]] = answers) -> None:
            while len(answers) < 3000 and not (answers and client.problem == "closed" and answers[-1].done()):
                answers.append(client.acquire("l", [page_name(1)], 1))

        asking = threading.Thread(target=ask)
        asking.start()
        client.close()
        asking.join()
        assert wait(answers, timeout=PATIENCE_S).not_done == set()


@pytest.mark.parametrize(
    ("code", "kind"),
    [("Overloaded", Overloaded), ("Refused", Refused), ("Lost", Lost), ("NewInTheNextVersion", Refused)],
)
async def test_what_the_store_raised_is_what_its_caller_catches(
    start_store: Start, code: str, kind: type[KvrelayError]
) -> None:
    attachment = await Attachment.open(start_store().socket_path, KEY, "w/1", FORMAT)
    answer: Future[Message] = Future()
    attachment.request(lambda id: Describe(id=id), Described, answer)
    attachment._settle(Rejected(id=1, code=code, reason="the reason"))
    with pytest.raises(KvrelayError, match="the reason") as caught:
        answer.result(timeout=0)
    assert type(caught.value) is kind
    attachment.close()


def test_a_client_may_start_before_its_store(start_store: Start, tmp_path: object, connect: Connect) -> None:
    store = start_store()
    path = store.socket_path
    store.kill()
    client = StoreClient(path, b"k" * 32, owner="w/1", format=FORMAT)
    client.start()
    wait_until(lambda: "cannot connect" in repr(client))
    assert not client.wait_attached(0)
    store.start()
    assert client.wait_attached(PATIENCE_S)
    client.close()
    assert client.arena is None


def test_a_clean_end_removes_the_socket_and_a_killed_store_leaks_no_memory(start_store: Start) -> None:
    store = start_store()
    store.signal(signal.SIGINT)
    store.process.wait(PATIENCE_S)
    assert not store.socket_path.exists()


def test_a_client_with_the_wrong_key_never_attaches(start_store: Start) -> None:
    client = StoreClient(start_store().socket_path, b"x" * 32, owner="w/1", format=FORMAT)
    client.start()
    wait_until(lambda: "key" in client.problem)
    assert not client.wait_attached(0)
    client.close()


def test_a_format_that_does_not_fit_is_refused_with_the_key_to_change(start_store: Start) -> None:
    big = PageFormat(layers=100, kv_heads=8, head_dim=128, dtype="float32", page_tokens=32)
    client = StoreClient(start_store().socket_path, b"k" * 32, owner="w/1", format=big)
    client.start()
    wait_until(lambda: "store.arena_bytes" in client.problem)
    assert not client.wait_attached(0)
    client.close()


def test_two_formats_live_in_one_store(start_store: Start, connect: Connect) -> None:
    other = PageFormat(layers=2, kv_heads=1, head_dim=16, dtype="bfloat16", page_tokens=4)
    store = start_store()
    ours, theirs = connect(store, "a/1"), connect(store, "b/1", format=other)
    ours.put(page_name(1), payload(1), 8)
    theirs.put(page_name(2), payload(2, 4, other), 4)
    assert ours.get(page_name(1)) == payload(1)
    assert theirs.get(page_name(2)) == payload(2, 4, other)


@pytest.mark.slow
def test_an_idle_store_hardly_wakes_up(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store, grant_slots=4)
    client.put(page_name(1), payload(1), 8)

    def wakes() -> int:
        total = 0
        for status in Path(f"/proc/{store.process.pid}/task").glob("*/status"):
            total += int(status.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
        return total

    def hardly_wakes() -> bool:
        """Two ticks a second, and little else."""
        before = wakes()
        time.sleep(2.0)
        return wakes() - before <= 8

    wait_until(hardly_wakes)
