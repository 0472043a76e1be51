"""What is asked of several routers of which one refuses: a drain that somebody else ordered stands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.cli.drain import _drain
from kvrelay.cli.draining import Routers
from kvrelay.deploy.ports import free_port
from kvrelay.errors import Lost, Refused
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.protocol.operator import DrainWorker, Remaining

KEY = b"k" * 32


class FakeRouter:
    """One that knows a single worker, or nobody yet. One that ``breaks`` obeys an order to drain, and hangs up."""

    def __init__(
        self,
        *,
        knows: bool = True,
        draining: bool = False,
        undoes: bool = True,
        breaks: bool = False,
        replicas: int = 1,
    ) -> None:
        self._knows = knows
        self._replicas = replicas
        self._undoes = undoes
        self._breaks = breaks
        self.draining = draining

    async def serve(self, link: Channel) -> None:
        while True:
            message = await link.recv()
            answer = self._answer(message)
            if self._breaks and isinstance(message, DrainWorker) and not message.undo:
                link.close()
                return
            await link.send(answer)

    def _answer(self, message: Message) -> Message:
        if not self._knows:
            return Rejected(code="Refused", reason="no worker is called d0")
        if isinstance(message, DrainWorker):
            if message.undo and not self._undoes:
                return Rejected(code="Refused", reason="not now")
            self.draining = not message.undo
        return Remaining(
            worker="d0",
            incarnation="i",
            draining=self.draining,
            gone=False,
            prompts=0,
            answers=0,
            transfers=0,
            routers=self._replicas,
        )


@asynccontextmanager
async def running(serve: Callable[[Channel], Coroutine[Any, Any, None]]) -> AsyncIterator[str]:
    """The address of a listener."""
    sock = bind_tcp("127.0.0.1", 0)
    listener = Listener(sock, KEY, receiver="router", purposes={"operator"}, serve=serve)
    task = asyncio.create_task(listener.run())
    yield f"127.0.0.1:{sock.getsockname()[1]}"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def refused(*routers: FakeRouter) -> str:
    """Why one of them refuses to drain ``d0``."""
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(running(each.serve)) for each in routers]
        orders = await stack.enter_async_context(Routers(addresses, KEY))
        with pytest.raises(Refused) as caught:
            await orders.drain("d0")
    return str(caught.value)


async def test_what_one_router_refuses_is_undone_at_the_others() -> None:
    first = FakeRouter()
    assert "no worker is called d0" in await refused(first, FakeRouter(knows=False))
    assert not first.draining


async def test_a_worker_that_drained_before_goes_on_draining() -> None:
    """The order is repeated while one router was just started and knows nobody yet."""
    first = FakeRouter(draining=True)
    assert "no worker is called d0" in await refused(first, FakeRouter(knows=False))
    assert first.draining


async def test_a_router_that_does_not_undo_it_is_named() -> None:
    said = await refused(FakeRouter(undoes=False), FakeRouter(knows=False))
    assert "no worker is called d0" in said
    assert "(not now): run kvrelay drain d0 --undo --router 127.0.0.1:" in said


async def test_a_router_whose_answer_was_lost_is_told_to_undo_it_as_well() -> None:
    first, lost = FakeRouter(), FakeRouter(breaks=True)
    said = await refused(first, FakeRouter(knows=False), lost)
    assert "no worker is called d0" in said
    assert "--undo" not in said
    assert not first.draining
    assert not lost.draining


async def test_a_router_whose_answers_are_both_lost_is_named() -> None:
    said = await refused(FakeRouter(), FakeRouter(knows=False), FakeRouter(breaks=True, undoes=False))
    assert "it may drain still at " in said
    assert "(not now): run kvrelay drain d0 --undo --router 127.0.0.1:" in said


async def test_the_router_that_has_another_key_is_named() -> None:
    async with running(FakeRouter().serve) as address, Routers([address], b"another" * 4) as orders:
        with pytest.raises(Refused, match=f"{address}: the peer does not hold this cluster's key"):
            await orders.drain("d0")


async def test_where_no_router_is_the_system_says_why_and_who_knows_where_it_is() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with Routers([address], KEY) as orders:
        with pytest.raises(Lost) as caught:
            await orders.drain("d0")
    told = "Connection refused; kvrelay up prints the --router of each of its routers"
    assert str(caught.value) == f"cannot connect to {address}: {told}"


async def test_a_worker_is_not_called_empty_while_a_replica_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(FakeRouter(replicas=2).serve) as one, running(FakeRouter(replicas=2).serve) as two:
        with pytest.raises(Lost, match=r"cannot be stopped: 1 of 2 routers \(router\.replicas\) was asked"):
            await _drain(Routers([one, one], KEY), "d0", deadline_s=None, force=False)
        told = capsys.readouterr()
        assert "warning: 1 of 2 routers" in told.err
        assert "can be stopped" not in told.out
        await _drain(Routers([one, two], KEY), "d0", deadline_s=None, force=False)
    assert "d0 is empty: it can be stopped." in capsys.readouterr().out
