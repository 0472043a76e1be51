"""Tests of cli/ask.py against a server that is no cluster, on real sockets; a process of its own gets the signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from kvrelay.cli import app as commands
from kvrelay.cli import silence
from kvrelay.cli.ask import _why_silent
from kvrelay.cli.terminal import console
from tests.patience import PATIENCE_S, until

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
        await asyncio.sleep(600)
    if end == "pause":
        await until(looked.is_set)
        await response.write(b"data: [DONE]\n\n")
    if end == "break":
        assert http.transport is not None
        http.transport.abort()
    if end == "whole":
        await response.write(b"data: [DONE]\n\n")
    return response


async def health(_http: web.Request) -> web.Response:
    looked.set()
    return web.json_response({"workers": [{"name": "d1", "ready": False}], "stores": [{"name": "s1", "ready": True}]})


async def unknown(http: web.Request) -> web.Response:
    return web.json_response({"error": {"message": f"no such request as {http.match_info['name']}"}}, status=404)


async def models(_http: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def timeline(http: web.Request) -> web.Response:
    """The first look comes before the end is noted, as it may on a busy machine."""
    looks.append(http.path)
    finished = {"finished": 2.0} if len(looks) > 1 else {}
    events = {"received": 0.0, "decode_sent": 0.1, "first_token": 1.5} | finished
    return web.json_response({"request_id": "req-1", "path": "local", "events": events})


looks: list[str] = []
looked = threading.Event()
"""The client looked who is away; a paused answer ends then."""


@web.middleware
async def locked(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if request.headers.get("authorization") != f"Bearer {KEY}":
        return web.json_response({"error": {"message": "no"}}, status=401)
    return await handler(request)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this process say nothing of silence: on a busy machine any answer may pause for some seconds."""
    monkeypatch.setattr(silence, "SILENT_S", PATIENCE_S)


@pytest.fixture
def url() -> Iterator[str]:
    """The server, on a thread: a command has the main thread, for its signals."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    app = web.Application(middlewares=[locked])
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/kvrelay/requests/req-1", timeline)
    app.router.add_get("/kvrelay/requests/{name}", unknown)
    app.router.add_post("/v1/chat/completions", chat)
    server = TestServer(app)
    try:
        asyncio.run_coroutine_threadsafe(server.start_server(), loop).result(PATIENCE_S)
        yield str(server.make_url("")).rstrip("/")
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def ask(question: str, url: str, key: str = KEY) -> tuple[int, str, str]:
    """Exit status, output and errors of ``kvrelay ask``, in this process."""
    return kvrelay("ask", question, "--url", url, key=key)


def kvrelay(*arguments: str, key: str = KEY) -> tuple[int, str, str]:
    """Exit status, output and errors of a command, in this process."""
    console.width = 80
    result = CliRunner().invoke(commands, arguments, env={"KVRELAY_API_KEY": key}, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def start(question: str, url: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "KVRELAY_API_KEY": KEY}
    command = [sys.executable, "-m", "kvrelay", "ask", question, "--url", url]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_answer_is_wrapped_at_words_whatever_the_end_of_the_url(url: str, end: str) -> None:
    status, out, error = ask("whole", url + end)
    assert (status, error) == (0, "")
    answer = out.split("\n\n")[0]
    assert answer.split() == ANSWER.split()
    assert len(answer.splitlines()) == 2
    assert max(map(len, out.splitlines())) <= 80
    assert "req-1" in out


def test_the_timeline_is_drawn_once_the_request_is_over(url: str) -> None:
    looks.clear()
    status, said, _ = ask("whole", url)
    assert (status, len(looks)) == (0, 2)
    assert "2,000 ms, first token after 1,500 ms" in said
    assert "decode" in said


@pytest.mark.slow
def test_a_request_whose_name_is_no_text_is_as_unknown_as_any(url: str) -> None:
    name = os.fsdecode(b"req-\xff")
    command = [sys.executable, "-m", "kvrelay", "explain", name, "--url", url, "--api-key", KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: /kvrelay/requests/req-")
    assert "answered 404: no such request as req-" in done.stderr


def test_what_is_another_server_is_told_so_without_its_page(url: str) -> None:
    for command, path in (("ask", "/v1/models"), ("explain", "/kvrelay/requests/req-1")):
        status, out, error = kvrelay(command, "req-1", "--url", f"{url}/page")
        assert (status, out) == (1, "")
        assert error == (
            f"error: what answers at {url}/page, which answered 404 to /page{path}, is no router of kvrelay; "
            "give --url the one of a cluster\n"
        )


def test_tls_where_there_is_none_is_told_so(url: str) -> None:
    status, _, error = kvrelay("ask", "whole", "--url", url.replace("http:", "https:"))
    assert status == 1
    assert error.startswith("error: no TLS is to be had at https://127.0.0.1:")
    assert error.endswith(f"; try --url {url}\n")


def test_a_pause_is_told_with_those_who_are_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked.clear()
    monkeypatch.setattr(silence, "SILENT_S", 0.05)
    status, out, error = ask("pause", url)
    assert status == 0
    assert out.startswith("The answer has words")
    assert error.startswith("no word for 0.05 s, still waiting: d1 not ready\n")


def test_a_pause_before_the_first_word_is_no_fault_to_worry_about() -> None:
    assert _why_silent([], begun=False) == "the prompt waits for its turn or is being read"
    assert _why_silent([], begun=True) == "all workers say that they are ready"
    assert _why_silent(["d1", "s1"], begun=False) == "d1, s1 not ready"


@pytest.mark.slow
def test_on_a_terminal_a_pause_is_told_in_a_line_of_its_own(url: str) -> None:
    looked.clear()
    screen, terminal = os.openpty()
    with start("pause", url, output=terminal) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to any more
            while piece := os.read(screen, 4096):
                shown += piece
    os.close(screen)
    assert process.returncode == 0
    lines = shown.decode().splitlines()
    assert "no word for 2 s, still waiting: d1 not ready" in lines
    assert lines[0].startswith("The answer has words")


@pytest.mark.parametrize("question", ["break", "end early"])
def test_an_answer_that_breaks_off_is_told_in_one_sentence(url: str, question: str) -> None:
    status, out, error = ask(question, url)
    assert status == 1
    assert out.endswith("wrapped.\n")
    assert error == f"error: the answer broke off: the router at {url} is gone; ask again once it is back\n"


@pytest.mark.slow
def test_an_interrupted_answer_ends_its_line_and_says_130(url: str) -> None:
    with start("hang", url) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (130, "")
    assert out.endswith("\n")


@pytest.mark.parametrize(("key", "text"), [("", "wants an API key"), ("wrong", "does not know this API key")])
def test_a_router_with_keys_says_how_to_give_one(url: str, key: str, text: str) -> None:
    status, _, error = ask("whole", url, key)
    assert status == 1
    assert text in error
    assert "--api-key KEY or KVRELAY_API_KEY" in error


@pytest.mark.parametrize("url", ["foo", "localhost:8000", "ftp://x"])
def test_what_is_no_url_is_told_so(url: str) -> None:
    status, _, error = ask("whole", url)
    assert (status, error) == (1, f"error: --url {url} is no URL; it looks like http://127.0.0.1:8000\n")
