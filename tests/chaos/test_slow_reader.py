"""A client that stops reading: its answer waits for it and for nothing else, and nobody is taken for dead."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvrelay.config import RouterConfig
from kvrelay.deploy.tiny import TinyShape, make_tiny
from tests.deploy.mock.test_mock_cluster import Mocks, mocked, prompt
from tests.patience import until

TOKENS, CHOICES = 3000, 4
"""More than all buffers between the worker and the client hold."""
READ_BYTES = 4096


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@pytest.fixture
async def mocks(tiny: Path) -> AsyncIterator[Mocks]:
    async with mocked(tiny, RouterConfig(port=0, control_port=0)) as mocks:
        yield mocks
        await mocks.cluster.at_rest()


async def asked(mocks: Mocks) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A long streamed answer, over a connection that takes little at a time."""
    host, port = mocks.cluster.url.removeprefix("http://").split(":")
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=narrow, limit=READ_BYTES)
    more = {"stream": True, "return_token_ids": True, "logprobs": 1, "n": CHOICES}
    body = {"model": "tiny", "prompt": prompt(0), "max_tokens": TOKENS, "ignore_eos": True, **more}
    raw = msgspec.json.encode(body)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return reader, writer


def written(mocks: Mocks) -> int:
    """Tokens that all decode workers wrote."""
    lives = [mocks.worker(name).life for name in ("decode-0", "decode-1")]
    return sum(life.engine.scheduler.totals.written for life in lives if life is not None)


@pytest.mark.slow
async def test_a_client_that_stops_reading_gets_the_whole_answer_once_it_reads_again(mocks: Mocks) -> None:
    reader, writer = await asked(mocks)
    assert (await reader.read(READ_BYTES)).startswith(b"HTTP/1.1 200")
    await until(lambda: written(mocks) == TOKENS * CHOICES, within_s=60)
    await asyncio.sleep(2.5)  # longer than a worker may be silent
    assert mocks.cluster.router.brain.in_flight == 1, "it waits for its client"
    answers = await asyncio.gather(*(mocks.stream(prompt(number), 12) for number in range(1, 9)))
    assert all(last == b"data: [DONE]" for _, last in answers), "others do not wait"
    rest = await reader.read(-1)
    assert b"data: [DONE]" in rest
    assert rest.count(b'"finish_reason":"length"') == CHOICES
    assert b'"error"' not in rest
    writer.close()
    brain = mocks.cluster.router.brain
    assert (brain.silences.stalls, brain.outcomes.breakers.opened) == (0, 0)
    assert not await mocks.cluster.metric("kvrelay_resumes_total")


@pytest.mark.slow
async def test_a_client_that_never_reads_again_and_leaves_holds_nothing(mocks: Mocks) -> None:
    reader, writer = await asked(mocks)
    assert (await reader.read(READ_BYTES)).startswith(b"HTTP/1.1 200")
    await until(lambda: written(mocks) == TOKENS * CHOICES, within_s=60)
    assert mocks.cluster.router.brain.in_flight == 1
    writer.transport.abort()
    await until(lambda: mocks.cluster.router.brain.in_flight == 0)
