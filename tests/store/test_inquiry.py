"""Questions to a store, of this node or another, from the thread that waits for the answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.channel import Channel, Listener, bind_unix
from kvrelay.channel import connect as connect_link
from kvrelay.errors import Lost, Malformed, Refused
from kvrelay.protocol.client import Allocate, Existing, NewPage
from kvrelay.store import inquiry
from kvrelay.store.client import StoreClient
from kvrelay.store.inquiry import Inquiry
from tests.store.conftest import KEY, StoreProcess, page_name, payload
from tests.store.test_client import publish, take

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]


def test_any_store_says_over_tcp_and_over_its_socket_which_pages_it_has(start_store: Start, connect: Connect) -> None:
    store = start_store()
    connect(store).put(page_name(1), payload(1), 8)
    for address in (store.address, store.socket_path):
        with Inquiry(address, KEY, sender="script") as inquiry:
            assert inquiry.exists([page_name(2), page_name(1)]) == [False, True]
            assert inquiry.exists([]) == []
            assert inquiry.describe()["pages_used"] == 1


def test_who_asks_owns_nothing_and_writes_nothing(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    with Inquiry(store.address, KEY, sender="script") as inquiry:
        before = inquiry.describe()
        assert client.describe() == before
    assert (before["owners"], before["slots_granted"]) == (1, 0)


def test_a_page_is_found_when_its_last_layer_is_in_and_not_before(start_store: Start, connect: Connect) -> None:
    store = start_store()
    writer = connect(store, grant_slots=1)
    (ref,) = take(writer, 1)
    with Inquiry(store.address, KEY, sender="script") as inquiry:
        writer.announce([NewPage(page_name(1), ref, 8)])
        publish(writer, ref, payload(1), range(2))
        assert writer.exists([page_name(1)]) == [False]
        assert inquiry.exists([page_name(1)]) == [False]
        publish(writer, ref, payload(1), range(2, 3))
        assert inquiry.exists([page_name(1)]) == [True]


def test_what_was_posted_before_a_question_was_taken_before_it_is_answered(
    start_store: Start, connect: Connect
) -> None:
    client = connect(start_store())
    client.put(page_name(1), payload(1), 8)
    for number in range(100):
        client.report({"posted": 1})
        assert client.describe()["posted"] == number + 1


def test_a_restarted_store_is_asked_anew(start_store: Start) -> None:
    store = start_store()
    with Inquiry(store.socket_path, KEY, sender="script") as inquiry:
        assert inquiry.exists([page_name(1)]) == [False]
        store.kill()
        with pytest.raises(Lost, match="no store at"):
            inquiry.exists([page_name(1)])
        store.start()
        assert inquiry.exists([page_name(1)]) == [False]
        store.kill()
        store.start()
        assert inquiry.exists([page_name(1)]) == [False], "the link was dead, and nobody had noticed"


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_lost_and_its_late_answer_is_no_other_ones(
    start_store: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start_store()
    connect(store).put(page_name(1), payload(1), 8)
    with Inquiry(store.address, KEY, sender="script") as asked:
        assert asked.exists([page_name(1)]) == [True]
        store.signal(signal.SIGSTOP)
        monkeypatch.setattr(inquiry, "ANSWER_S", 0.2)
        with pytest.raises(Lost, match="did not answer"):
            asked.exists([page_name(2)])
        monkeypatch.setattr(inquiry, "ANSWER_S", 5.0)
        store.signal(signal.SIGCONT)
        assert asked.exists([page_name(1)]) == [True]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere..:1", Path("/no/such.sock")])
def test_where_no_store_is_the_answer_is_lost(address: str | Path) -> None:
    with pytest.raises(Lost, match="no store at"):
        Inquiry(address, KEY, sender="script").exists([])


def test_an_address_without_a_port_is_refused_before_anybody_is_dialled() -> None:
    with pytest.raises(Malformed, match="host:port"):
        Inquiry("somewhere", KEY, sender="script").exists([])


def test_without_the_key_nothing_is_told(start_store: Start) -> None:
    store = start_store()
    for address in (store.address, store.socket_path):
        with pytest.raises(Refused, match="key"):
            Inquiry(address, b"x" * 32, sender="thief").exists([page_name(1)])


async def test_over_a_link_for_questions_nothing_else_can_be_said(start_store: Start) -> None:
    store = start_store()
    link = await connect_link(store.address, KEY, sender="rogue", purpose="inquiry")
    await link.send(Allocate(id=1, count=1))
    with pytest.raises(Lost):
        await link.recv()
    link.close()


def test_threads_that_share_a_link_each_get_their_own_answer(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    client.put_many([(page_name(number), payload(number), 8) for number in range(8)])
    with Inquiry(store.address, KEY, sender="script") as inquiry, ThreadPoolExecutor(8) as threads:

        def ask(number: int) -> bool:
            return all(inquiry.exists([page_name(number), page_name(99)]) == [True, False] for _ in range(50))

        assert all(threads.map(ask, range(8)))


async def test_an_answer_to_fewer_names_than_were_asked_is_no_answer(tmp_path: Path) -> None:
    async def serve(link: Channel) -> None:
        while True:
            await link.recv()
            await link.send(Existing(id=0, present=[True]))

    listener = Listener(bind_unix(tmp_path / "s"), KEY, receiver="odd", purposes={"inquiry"}, serve=serve)
    serving = asyncio.create_task(listener.run())
    asked = Inquiry(tmp_path / "s", KEY, sender="script")
    assert await asyncio.to_thread(asked.exists, [page_name(1)]) == [True]
    with pytest.raises(Malformed, match="answered"):
        await asyncio.to_thread(asked.exists, [page_name(1), page_name(2)])
    asked.close()
    serving.cancel()
