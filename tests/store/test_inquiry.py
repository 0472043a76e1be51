"""Questions to a store, of this node or another, from the thread that waits for the answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from kvrelay.channel import Channel, Listener, bind_unix
from kvrelay.channel import connect as connect_link
from kvrelay.config import StoreConfig
from kvrelay.errors import Lost, Malformed, Refused
from kvrelay.protocol.client import Allocate, Existing, Exists, NewPage
from kvrelay.protocol.frame import encode
from kvrelay.store import inquiry
from kvrelay.store.answers import Answers
from kvrelay.store.client import StoreClient
from kvrelay.store.inquiry import Inquiry
from kvrelay.store.keeper import Keeper
from kvrelay.store.peers import Peers
from tests.patience import PATIENCE_S, until
from tests.store.conftest import KEY, STRIDE, StoreProcess, page_name, payload
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


async def test_a_caller_that_does_not_read_its_answers_loses_its_link() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    link, caller = Channel(ours), Channel(theirs)
    keeper = Keeper("s", StoreConfig(arena_bytes=64 * STRIDE), 1, lambda event: None)
    answers = Answers(keeper, cast(Peers, None), lambda: 0.0)
    serving = asyncio.create_task(answers.serve(link, stall_s=0.1))

    async def ask() -> None:
        names = [page_name(number) for number in range(10_000)]
        while not serving.done():
            await caller.send(Exists(id=1, names=names))

    asking = asyncio.create_task(ask())
    with pytest.raises(Lost, match="moved nothing"):
        await asyncio.wait_for(serving, PATIENCE_S)
    with contextlib.suppress(Lost):
        await asking
    caller.close()


def test_threads_that_share_a_link_each_get_their_own_answer(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store)
    client.put_many([(page_name(number), payload(number), 8) for number in range(8)])
    with Inquiry(store.address, KEY, sender="script") as inquiry, ThreadPoolExecutor(8) as threads:

        def ask(number: int) -> bool:
            return all(inquiry.exists([page_name(number), page_name(99)]) == [True, False] for _ in range(50))

        assert all(threads.map(ask, range(8)))


class Odd:
    """A store that answers as a test wants it to, or not at all."""

    def __init__(self, path: Path, answer: Callable[[Channel, Exists], Awaitable[None]]) -> None:
        self.links = self.asked = 0
        self._answer = answer
        self._listener = Listener(bind_unix(path), KEY, receiver="odd", purposes={"inquiry"}, serve=self._serve)

    async def _serve(self, link: Channel) -> None:
        self.links += 1
        while True:
            question = await link.recv()
            assert isinstance(question, Exists)
            self.asked += 1
            await self._answer(link, question)

    async def __aenter__(self) -> Odd:
        self._serving = asyncio.create_task(self._listener.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving


async def yes(link: Channel, question: Exists) -> None:
    await link.send(Existing(id=question.id, present=[True]))


async def never(link: Channel, question: Exists) -> None: ...


async def test_an_answer_to_fewer_names_than_were_asked_is_no_answer(tmp_path: Path) -> None:
    with Inquiry(tmp_path / "s", KEY, sender="script") as asked:
        async with Odd(tmp_path / "s", yes):
            assert await asyncio.to_thread(asked.exists, [page_name(1)]) == [True]
            with pytest.raises(Malformed, match="answered 1 times to 2 names"):
                await asyncio.to_thread(asked.exists, [page_name(1), page_name(2)])


async def test_the_answer_to_another_question_is_no_answer_and_ends_the_link(tmp_path: Path) -> None:
    async def confuse(link: Channel, question: Exists) -> None:
        await link.send(Existing(id=question.id - (store.links == 1), present=[True]))

    with Inquiry(tmp_path / "s", KEY, sender="script") as asked:
        async with Odd(tmp_path / "s", confuse) as store:
            with pytest.raises(Malformed, match="answered question 0, not 1"):
                await asyncio.to_thread(asked.exists, [page_name(1)])
            assert await asyncio.to_thread(asked.exists, [page_name(1)]) == [True]
            assert store.links == 2


def test_the_answer_to_an_interrupted_question_is_no_other_ones(start_store: Start, connect: Connect) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    store = start_store()
    connect(store).put(page_name(1), payload(1), 8)
    before = signal.signal(signal.SIGUSR1, interrupt)
    with Inquiry(store.address, KEY, sender="script") as asked:
        assert asked.exists([page_name(1)]) == [True]
        store.signal(signal.SIGSTOP)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(Interrupted):
            asked.exists([page_name(1)])
        signal.signal(signal.SIGUSR1, before)
        store.signal(signal.SIGCONT)
        assert asked.exists([page_name(2)]) == [False]
        assert asked.exists([page_name(1)]) == [True]


async def test_a_process_that_is_forked_off_asks_over_a_link_of_its_own(tmp_path: Path) -> None:
    with Inquiry(tmp_path / "s", KEY, sender="script") as asked:
        async with Odd(tmp_path / "s", yes) as store:
            await asyncio.to_thread(asked.exists, [page_name(1)])
            child = os.fork()
            if not child:
                status = 1
                try:
                    status = 0 if asked.exists([page_name(1)]) == [True] else 1
                    asked.close()
                finally:
                    os._exit(status)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert (status, store.links) == (0, 2)
            assert await asyncio.to_thread(asked.exists, [page_name(1)]) == [True]
            assert store.links == 2, "the child ended its parent's link"


async def test_a_fork_need_not_wait_for_a_question_that_its_parent_is_asking(tmp_path: Path) -> None:
    async def answer(link: Channel, question: Exists) -> None:
        if store.links > 1:
            await yes(link, question)

    with Inquiry(tmp_path / "s", KEY, sender="script") as asked:
        async with Odd(tmp_path / "s", answer) as store:
            asking = asyncio.create_task(asyncio.to_thread(asked.exists, [page_name(1)]))
            await until(lambda: store.asked == 1)
            child = os.fork()
            if not child:
                status = 1
                try:
                    status = 0 if asked.exists([page_name(1)]) == [True] else 1
                finally:
                    os._exit(status)
            assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
            asked.close()
            with pytest.raises(Lost, match="closed here"):
                await asking


async def test_an_answer_that_comes_in_drops_is_late_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drip(link: Channel, question: Exists) -> None:
        data = encode(Existing(id=question.id, present=[True] * 100))
        for byte in data:
            link._sock.send(bytes([byte]))
            await asyncio.sleep(0.05)

    monkeypatch.setattr(inquiry, "ANSWER_S", 1.0)
    with Inquiry(tmp_path / "s", KEY, sender="script") as asked:
        async with Odd(tmp_path / "s", drip):
            with pytest.raises(Lost, match="did not answer within 1 s"):
                await asyncio.to_thread(asked.exists, [page_name(1)] * 100)


async def test_neither_a_question_nor_the_end_waits_for_other_questions_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "ANSWER_S", 20.0)
    with Inquiry(tmp_path / "s", KEY, sender="script") as asked:
        async with Odd(tmp_path / "s", never) as store:
            first = asyncio.create_task(asyncio.to_thread(asked.exists, [page_name(1)]))
            await until(lambda: store.asked == 1)
            monkeypatch.setattr(inquiry, "ANSWER_S", 0.1)
            with pytest.raises(Lost, match="other questions"):
                await asyncio.to_thread(asked.exists, [page_name(1)])
            asked.close()
            with pytest.raises(Lost, match="closed here"):
                await first
            assert store.links == 1
