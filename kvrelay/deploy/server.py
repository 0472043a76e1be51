"""One running vLLM server: started, its log read, asked for its health, ended without a trace.

It must never outlive the block that opened it, and never be called serving before /health answered 200.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

import aiohttp

from kvrelay.deploy.engine import EngineSpec, engine_command, engine_environment
from kvrelay.deploy.process import Child, describe_exit
from kvrelay.deploy.scratch import scratch
from kvrelay.errors import Lost

HEALTH_POLL_S = 0.2
HEALTH_TIMEOUT_S = 2.0
STOP_GRACE_S = 10.0
_TAIL_LINES = 40
_LONGEST_PARENT = 107 - len("/vllm-12345678/00000000-0000-0000-0000-000000000000")

Sink = Callable[[bytes], None]
"""Takes one line of the engine's log."""


class EngineServer:
    """A vLLM process and what is known of it."""

    def __init__(self, spec: EngineSpec, child: Child, http: aiohttp.ClientSession, *, quote_log: bool) -> None:
        self.spec = spec
        self._child = child
        self._http = http
        self._quote_log = quote_log
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.log_lines_lost = 0
        """Lines of the engine's log that could not be written."""

    def __repr__(self) -> str:
        return f"<EngineServer {self.spec.url}, {self._child!r}>"

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def pid(self) -> int:
        return self._child.pid

    async def relay_log(self, sink: Sink) -> None:
        """Hand the engine's log to ``sink``, line by line, until it ends.

        What a full disk does not take is lost and counted: an engine whose pipe nobody reads would stand still.
        """
        output = self._child.output
        assert output is not None, "the engine is started with a pipe"
        while line := await _read_line(output):
            self._tail.append(line.decode(errors="replace").rstrip())
            try:
                sink(line)
            except OSError:
                self.log_lines_lost += 1

    async def wait_serving(self, within_s: float) -> None:
        """Return once /health answers 200. Raises ``Lost``, with the end of the log, when that does not come."""
        try:
            async with asyncio.timeout(within_s):
                while not await self.is_healthy():
                    if not self._child.running:
                        raise self._lost("died while it started")
                    await asyncio.sleep(HEALTH_POLL_S)
        except TimeoutError as error:
            raise self._lost(f"was not serving after {within_s:g} s (worker.start_wait_s)") from error

    async def is_healthy(self) -> bool:
        """Whether the process lives and its /health answers 200."""
        if not self._child.running:
            return False
        try:
            async with self._http.get(f"{self.url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def wait_death(self) -> None:
        """Wait for the process to end, and raise ``Lost`` then."""
        await self._child.wait()
        raise self._lost("died")

    def _lost(self, what: str) -> Lost:
        state = "" if self._child.running else f" ({describe_exit(self._child.exit_status)})"
        if not self._quote_log:
            return Lost(f"the engine at {self.url} {what}{state}; see its log above")
        tail = "\n".join(self._tail) or "(it logged nothing)"
        return Lost(f"the engine at {self.url} {what}{state}. The end of its log:\n{tail}")

    async def stop(self) -> None:
        await self._child.stop(STOP_GRACE_S)


async def _read_line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readline()
    except ValueError:  # a line over the reader's limit: its end is dropped with it
        return b"(a line too long to show)\n"


def write_to(stream: IO[bytes]) -> Sink:
    def write(line: bytes) -> None:
        stream.write(line)
        stream.flush()

    return write


def socket_parent() -> str:
    """Where vLLM's unix sockets (``vllm-XXXXXXXX/`` and a UUID) fit into the 107 bytes of a socket's path."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_PARENT else "/tmp"


@contextlib.asynccontextmanager
async def engine_server(
    spec: EngineSpec, sink: Sink | None = None, *, api_key: str = ""
) -> AsyncIterator[EngineServer]:
    """Start ``spec`` and end it, with everything below it, when the block ends. Await ``wait_serving`` inside.

    ``sink`` takes the log; this process's stdout when None. An engine with a connector needs an ``api_key``.
    """
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    with scratch("vllm-", socket_parent()) as folder:
        environment = engine_environment(spec, {**os.environ, "TMPDIR": str(folder)}, api_key)
        child = await Child.start("engine", engine_command(spec), environment, asyncio.subprocess.PIPE)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            engine = EngineServer(spec, child, http, quote_log=sink is not None)
            log = asyncio.create_task(engine.relay_log(sink or write_to(sys.stdout.buffer)))
            try:
                yield engine
            finally:
                await asyncio.shield(engine.stop())
                log.cancel()
                await asyncio.gather(log, return_exceptions=True)


@contextlib.asynccontextmanager
async def plain_engine(spec: EngineSpec, log: Path, start_wait_s: float = 600.0) -> AsyncIterator[EngineServer]:
    """A serving, unsplit engine (the baseline of tests and benchmarks), its log in the file ``log``."""
    with log.open("wb") as file:
        async with engine_server(spec, write_to(file)) as engine:
            await engine.wait_serving(start_wait_s)
            yield engine
