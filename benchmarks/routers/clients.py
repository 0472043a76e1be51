"""Clients of a router, in a process of their own: a closed loop, or arrivals at a rate.

    python -m benchmarks.routers.clients SPEC.json

prints what they saw as one line of JSON. Processor time of the router, the mocks and these clients is taken over
exactly the measured time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from benchmarks.idle import Cpu
from benchmarks.quantiles import quantile
from benchmarks.routers import wire

_END_S = 60.0
"""Longest wait for what is still running when the time is up."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask of whom."""

    port: int
    model: str
    texts: list[str]
    """Tails of prompts; a number before each makes no two alike from their first token on."""
    max_tokens: int
    stream: bool = False
    clients: int = 0
    """A closed loop of so many; 0: ``rate`` requests a second instead."""
    rate: float = 0.0
    warm_s: float = 1.0
    seconds: float = 0.0
    requests: int = 0
    """Ends after so many instead of after ``seconds``."""
    pids: dict[str, list[int]] = {}
    """Whose processor time is taken, each process with its children."""
    first: int = 0
    """Number of the first prompt."""


class Seen(msgspec.Struct, kw_only=True):
    """What the clients saw."""

    seconds: float = 0.0
    requests: int = 0
    failed: int = 0
    events: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    """99th percentile of the time to the first byte after the head (a stream's first event, or the answer)."""
    cpu_s: dict[str, float] = {}
    next: int = 0
    """Number of the next prompt."""


class Client(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, over: Callable[[Client], None]) -> None:
        self._over = over
        self._outcome = wire.Outcome()
        self.begun_s = 0.0
        self.first_s = 0.0
        self.last = (0, 0)
        """Status and events of the last answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def ask(self, data: bytes) -> None:
        self._outcome, self.first_s, self.begun_s = wire.Outcome(), 0.0, time.perf_counter()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        done = self._outcome.feed(data)
        if not self.first_s and (self._outcome.events or done):
            self.first_s = time.perf_counter()
        if done:
            self.last = self._outcome.status, self._outcome.events
            self._over(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._transport.is_closing() or error is not None:
            self.last = 0, 0


class Load:
    """The clients of one run and their counts."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._numbers = itertools.count(spec.first)
        self._idle: deque[Client] = deque()
        self._running = 0
        self._first_s: list[float] = []
        self._measuring = False
        self._open = True
        self._at_rest = asyncio.Event()
        self._enough = asyncio.Event()
        self._seen = Seen()
        asked = {"model": spec.model, "max_tokens": spec.max_tokens, "stream": spec.stream, "ignore_eos": True}
        self._head = f'{json.dumps(asked)[:-1]}, "prompt": "'
        self._tails = [f' {text}"}}' for text in spec.texts]

    def __repr__(self) -> str:
        return f"<Load {self._running} running, {self._seen.requests} seen>"

    def _request(self) -> bytes:
        number = next(self._numbers)
        body = f"{self._head}{number * 7919 % 9_999_991}{self._tails[number % len(self._tails)]}".encode()
        return wire.request("127.0.0.1", "/v1/completions", body)

    def _over(self, client: Client) -> None:
        self._running -= 1
        if self._measuring:
            self._note(client)
        if self._open and self._spec.clients:
            self._ask(client)
            return
        self._idle.append(client)
        if not self._running:
            self._at_rest.set()

    def _note(self, client: Client) -> None:
        status, events = client.last
        self._seen.requests += 1
        self._seen.failed += status != 200
        self._seen.events += max(0, events - 1)  # [DONE]
        self._first_s.append(client.first_s - client.begun_s)
        if self._seen.requests == self._spec.requests:
            self._enough.set()

    def _ask(self, client: Client) -> None:
        self._running += 1
        self._at_rest.clear()
        client.ask(self._request())

    async def _connect(self) -> Client:
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: Client(self._over), "127.0.0.1", self._spec.port
        )
        return client

    async def run(self) -> Seen:
        """Warm up, measure, let the last ones end."""
        spec = self._spec
        arrivals = asyncio.create_task(self._arrive()) if spec.rate else None
        for _ in range(spec.clients):
            self._ask(await self._connect())
        await asyncio.sleep(spec.warm_s)
        meters = {name: Cpu.trees(pids) for name, pids in {**spec.pids, "clients": [os.getpid()]}.items()}
        begin_s, self._measuring = time.perf_counter(), True
        if spec.requests:
            await self._enough.wait()
        else:
            await asyncio.sleep(spec.seconds)
        self._measuring, self._seen.seconds = False, time.perf_counter() - begin_s
        self._seen.cpu_s = {name: meter.used_s() for name, meter in meters.items()}
        self._open = False
        if arrivals is not None:
            arrivals.cancel()
        if self._running:
            await asyncio.wait_for(self._at_rest.wait(), _END_S)
        self._seen.next = next(self._numbers)
        self._seen.p50_ms, self._seen.p99_ms = (1e3 * quantile(self._first_s, share) for share in (0.5, 0.99))
        return self._seen

    async def _arrive(self) -> None:
        """Arrivals around the rate: a clock's would meet the same ticks again and again."""
        dice = random.Random(1)
        while True:
            await asyncio.sleep(dice.uniform(0.5, 1.5) / self._spec.rate)
            self._ask(self._idle.popleft() if self._idle else await self._connect())


if __name__ == "__main__":
    given = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    print(msgspec.json.encode(uvloop.run(Load(given).run())).decode(), flush=True)
