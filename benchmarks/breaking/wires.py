"""A way over TCP from one party of a cluster to another that can be cut: then nothing passes and nobody is told, as if
packets got lost; afterwards all of it goes on. It must never drop or change a byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

from kvrelay.channel import split_address

_READ_BYTES = 1 << 16


class Wire:
    """A proxy: connections to ``address`` go on to ``target``. To be made and closed inside the running event loop."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.carried_bytes = 0
        """Both ways together."""
        self._whole = asyncio.Event()
        self._whole.set()
        self._calls: set[asyncio.Task[None]] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._socket.setblocking(False)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._taking = asyncio.create_task(self._take_calls())

    def __repr__(self) -> str:
        state = "whole" if self._whole.is_set() else "cut"
        return f"<Wire to {self.target}, {state}, {len(self._calls)} connections>"

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def close(self) -> None:
        """End every connection."""
        ending = [self._taking, *self._calls]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._socket.close()

    async def _take_calls(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._socket)
            call = asyncio.create_task(self._carry(near))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _carry(self, near: socket.socket) -> None:
        here = await asyncio.open_connection(sock=near)
        writers = [here[1]]
        try:
            await self._whole.wait()
            there = await asyncio.open_connection(*split_address(self.target))
            writers.append(there[1])
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(here[0], there[1]))
                both.create_task(self._pass_on(there[0], here[1]))
        except* OSError:  # one side is gone: so is the other one
            for writer in writers:
                writer.transport.abort()
        finally:
            for writer in writers:
                writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the end of what comes, which is passed on too."""
        while data := await reader.read(_READ_BYTES):
            await self._whole.wait()
            self.carried_bytes += len(data)
            writer.write(data)
            await writer.drain()
        await self._whole.wait()
        writer.write_eof()
        await writer.drain()


@contextlib.contextmanager
def cut(wires: list[Wire]) -> Iterator[None]:
    """Nothing passes inside the block."""
    for wire in wires:
        wire.cut()
    try:
        yield
    finally:
        for wire in wires:
            wire.mend()
