"""Clients whose answers hang: their router is asked why while it still knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from kvrelay.deploy.chaos.clients import Clients, Question
from kvrelay.deploy.chaos.stories import tell
from kvrelay.deploy.chaos.verdict import Verdict
from kvrelay.errors import Lost
from tests.patience import until

HUNG_S = 0.3
NOW = {
    "waits_for": "decode",
    "waits_s": 61.2,
    "given_up_s": 1.5,
    "begun": True,
    "decode": {"worker": "d7", "usable": True, "heard_s": 0.1, "progress_s": 0.2},
    "prefills": [{"worker": "p1", "known": False, "state": "sent"}],
}
LOSSES = [{"lost_worker": "d3", "lost_at": 4.0, "reason": "silent"}]


class Router:
    """Answers with one token and then nothing, or not at all."""

    def __init__(self) -> None:
        self.begins = True
        self.refusal = ""
        self.running: set[str] = set()
        self.asked: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/kvrelay/requests", self._list)
        app.router.add_get("/kvrelay/requests/{id}", self._one)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        if self.refusal:
            return web.json_response({"error": {"message": self.refusal}}, status=503)
        if not (await http.json())["stream"]:
            return web.json_response({"choices": [{"text": "a b"}]})
        name = f"req-{len(self.asked)}"
        self.running.add(name)
        try:
            response = web.StreamResponse(headers={"x-request-id": name})
            if self.begins:
                await response.prepare(http)
                await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.Event().wait()
            return response
        finally:
            self.running.discard(name)

    async def _list(self, _: web.Request) -> web.Response:
        begun = [{"request_id": "req-other", "age_s": HUNG_S, "now": NOW}]
        mine = [{"request_id": name, "age_s": 9.0, "now": NOW | {"begun": False}} for name in self.running]
        return web.json_response({"requests": begun + mine})

    async def _one(self, http: web.Request) -> web.Response:
        name = http.match_info["id"]
        self.asked.append(name)
        known = {"now": NOW, "resumptions": LOSSES} if name in self.running else {"status": 499}
        return web.json_response({"request_id": name} | known)


@pytest.fixture
async def asking() -> AsyncIterator[tuple[Router, Clients]]:
    router = Router()
    runner = web.AppRunner(router.app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield router, Clients(http, url, [Question(0, "hi", 2)], hung_s=HUNG_S)
    await runner.cleanup()


@pytest.mark.parametrize("begins", [True, False], ids=["after a token", "before its head"])
async def test_an_answer_that_hangs_tells_what_it_waited_for(asking: tuple[Router, Clients], begins: bool) -> None:
    router, clients = asking
    router.begins = begins
    await clients.learn()
    async with clients:
        clients.start(1, seed=0)
        await until(lambda: bool(clients.tally.failures))
        clients.stopped = True
    assert clients.tally.verdicts.keys() == {Verdict.HUNG}
    failure = clients.tally.failures[0]
    assert "it waits for decode since 61.2 s" in failure
    assert "its D is d7 (usable, heard 0.1 s ago, progress 0.2 s ago)" in failure
    assert "a prompt is sent at p1, which is unknown" in failure
    assert "d3 was lost at 4.0 s (silent)" in failure
    assert "req-other" not in router.asked
    await until(lambda: not router.running)


async def test_a_router_that_cannot_be_asked_is_told_of(asking: tuple[Router, Clients]) -> None:
    _, clients = asking
    await clients.learn()
    clients._stories._url = "http://127.0.0.1:1"
    async with clients:
        clients.start(1, seed=0)
        await until(lambda: bool(clients.tally.failures))
        clients.stopped = True
    assert "the router could not be asked" in clients.tally.failures[0]


def test_what_is_over_is_told_as_such() -> None:
    assert tell({"status": 499}).startswith("the router has no such request in flight (status 499)")


async def test_a_refusal_before_anything_is_broken_is_told_in_its_own_words(asking: tuple[Router, Clients]) -> None:
    router, clients = asking
    router.refusal = "the first token is predicted after 1.68 s"
    with pytest.raises(
        Lost, match=r"answers 503 before anything is broken: the first token is predicted after 1\.68 s$"
    ):
        await clients.learn()


async def test_where_no_router_is_the_system_says_why() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(Lost, match=r"cannot be reached \(Connection refused\); start the cluster"):
            await Clients(http, "http://127.0.0.1:1", [Question(0, "hi", 2)], hung_s=HUNG_S).learn()
