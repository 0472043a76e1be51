"""Tests of cli/ask.py against a server that is no cluster: real sockets, a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

ANSWER = "The answer has words enough for more than one line of eighty columns, so that it has to be wrapped."
KEY = "a-secret"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


async def chat(http: web.Request) -> web.StreamResponse:
    end = (await http.json())["messages"][0]["content"]
    response = web.StreamResponse(headers={"x-request-id": "req-1"})
    await response.prepare(http)
    await response.write(event(ANSWER))
    if end == "hang":
        await asyncio.sleep(60)
    if end == "break":
        assert http.transport is not None
        http.transport.abort()
    if end == "whole":
        await response.write(b"data: [DONE]\n\n")
    return response


async def models(_http: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def timeline(_http: web.Request) -> web.Response:
    return web.json_response({"request_id": "req-1"})


@web.middleware
async def locked(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if request.headers.get("authorization") != f"Bearer {KEY}":
        return web.json_response({"error": {"message": "no"}}, status=401)
    return await handler(request)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application(middlewares=[locked])
    app.router.add_get("/v1/models", models)
    app.router.add_get("/kvrelay/requests/req-1", timeline)
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def start(question: str, url: str, key: str = KEY) -> asyncio.subprocess.Process:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "KVRELAY_API_KEY": key}
    command = [sys.executable, "-m", "kvrelay", "ask", question, "--url", url]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)


async def ask(question: str, url: str, key: str = KEY) -> tuple[int, str, str]:
    process = await start(question, url, key)
    out, error = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_the_answer_is_wrapped_at_words_whatever_the_end_of_the_url(url: str, end: str) -> None:
    status, out, error = await ask("whole", url + end)
    assert (status, error) == (0, "")
    answer = out.split("\n\n")[0]
    assert answer.split() == ANSWER.split()
    assert len(answer.splitlines()) == 2
    assert max(map(len, out.splitlines())) <= 80
    assert "req-1" in out


@pytest.mark.parametrize("question", ["break", "end early"])
async def test_an_answer_that_breaks_off_is_told_in_one_sentence(url: str, question: str) -> None:
    status, out, error = await ask(question, url)
    assert status == 1
    assert out.endswith("wrapped.\n")
    assert error == f"error: the answer broke off: the router at {url} is gone; ask again once it is back\n"


async def test_an_interrupted_answer_ends_its_line_and_says_130(url: str) -> None:
    process = await start("hang", url)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 30)
    process.send_signal(signal.SIGINT)
    out, error = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, error) == (130, b"")
    assert out.endswith(b"\n")


@pytest.mark.parametrize(("key", "text"), [("", "wants an API key"), ("wrong", "does not know this API key")])
async def test_a_router_with_keys_says_how_to_give_one(url: str, key: str, text: str) -> None:
    status, _, error = await ask("whole", url, key)
    assert status == 1
    assert text in error
    assert "--api-key KEY or KVRELAY_API_KEY" in error


@pytest.mark.parametrize("url", ["foo", "localhost:8000", "ftp://x"])
async def test_what_is_no_url_is_told_so(url: str) -> None:
    status, _, error = await ask("whole", url)
    assert (status, error) == (1, f"error: --url {url} is no URL; it looks like http://127.0.0.1:8000\n")
