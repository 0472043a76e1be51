"""Engines that cost next to nothing: they answer at once in vLLM's shape, and stream a chunk per stream and tick.

    python -m benchmarks.routers.mock ENGINES TICK_S [CONTROL KEY_FILE ROLES MODEL_PATH]

prints the engines' ports as JSON. With CONTROL they and a store beside each register at a kvrelay router, as ROLES says
(``p``, ``d`` or ``b`` for each engine), and tell it of pages and milestones.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from benchmarks.routers import wire
from benchmarks.routers.holders import Holder, names_of, store, worker
from kvrelay.deploy.key import read_key
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg, read_handoff
from kvrelay.router.tokens import Tokens, load_tokens
from kvrelay.types import Role, Stage

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
_CREATED = b'"created":1700000000,"model":"mock"'
_EVENT = wire.chunk(
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion",' + _CREATED + b',"choices":[{"index":0,'
    b'"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}],"usage":null}\n\n'
)
_DONE = wire.chunk(b"data: [DONE]\n\n")
_REMOTE = b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_block_ids":[1],'
_REMOTE += b'"remote_host":"127.0.0.1","remote_port":1,"tp_size":1}'


class Asked(msgspec.Struct):
    """What a mock reads of a request."""

    prompt: list[int] | str = ""
    stream: bool = False
    max_tokens: int = 16
    kv_transfer_params: dict[str, object] | None = None


class Rendering(msgspec.Struct):
    """What a mock reads of a rendering request."""

    prompt: list[str] | str = ""
    messages: list[dict[str, str]] | None = None


_asked = msgspec.json.Decoder(Asked)
_rendering = msgspec.json.Decoder(Rendering)


class Ticker:
    """Every stream gets one write a tick."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._streams: dict[asyncio.Transport, Iterator[bytes]] = {}

    def __repr__(self) -> str:
        return f"<Ticker {len(self._streams)} streams>"

    def add(self, transport: asyncio.Transport, tokens: int) -> None:
        """``tokens`` events and the end; all at once where there are no ticks."""
        if self._tick_s == 0.0:
            transport.writelines([wire.STREAM_HEAD, _EVENT])  # the first token is a packet of its own
            transport.write(_EVENT * (tokens - 1) + _DONE + wire.LAST_CHUNK)
            return
        transport.write(wire.STREAM_HEAD)
        self._streams[transport] = chain(repeat(_EVENT, tokens), [_DONE + wire.LAST_CHUNK])

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while self._tick_s:
            for transport, pieces in list(self._streams.items()):
                piece = next(pieces, None)
                if piece is None or transport.is_closing():
                    del self._streams[transport]
                else:
                    transport.write(piece)
            due_s = max(due_s + self._tick_s, loop.time())
            await asyncio.sleep(due_s - loop.time())


class Engine:
    """One engine with its port."""

    def __init__(self, ticker: Ticker, tokens: Tokens | None) -> None:
        self._ticker = ticker
        self._tokens = tokens
        self.port = 0
        self.holder: Holder | None = None
        self.store: Holder | None = None

    def __repr__(self) -> str:
        return f"<Engine at {self.port}>"

    def respond(self, path: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if path.endswith(b"/completions"):
            self._generate(_asked.decode(body), transport)
        elif path.endswith(b"/render") and self._tokens is not None:
            asyncio.get_running_loop().create_task(self._render(_rendering.decode(body), transport))
        elif path == b"/v1/models":
            transport.write(wire.answer(b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"m"}]}'))
        else:
            transport.write(wire.answer(b"{}"))

    def _generate(self, asked: Asked, transport: asyncio.Transport) -> None:
        params = asked.kv_transfer_params
        if self.holder is not None:
            self._tell(asked, params)
        if asked.stream:
            self._ticker.add(transport, asked.max_tokens)
            return
        remote = _REMOTE if params and params.get("do_remote_decode") else b"null"
        prompt, written = len(asked.prompt), asked.max_tokens
        transport.write(
            wire.answer(
                b'{"id":"cmpl-0123456789abcdef","object":"text_completion",%b,"choices":[{"index":0,"text":"%b",'
                b'"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":{"prompt_tokens":%d,'
                b'"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}},'
                b'"kv_transfer_params":%b}' % (_CREATED, b" word" * written, prompt, prompt + written, written, remote)
            )
        )

    def _tell(self, asked: Asked, params: dict[str, object] | None) -> None:
        assert self.holder is not None
        assert self.store is not None
        if isinstance(asked.prompt, list):
            names = names_of(asked.prompt)
            self.holder.got(names)
            self.store.got(names)
        match read_handoff(params):
            case PrefillLeg(transfer=transfer):
                self.store.reached(transfer, Stage.STARTED, Stage.LAST_CHUNK, Stage.SENT)
            case DecodeLeg(transfers=transfers):
                for transfer in transfers:
                    self.store.reached(transfer, Stage.ARRIVED, Stage.LOADED)

    async def _render(self, asked: Rendering, transport: asyncio.Transport) -> None:
        assert self._tokens is not None
        if asked.messages is not None:
            found: object = {"token_ids": await self._tokens.encode_chat(asked.messages)}
        else:
            texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
            found = [{"token_ids": ids} for ids in await self._tokens.encode_all(texts, special=True)]
        transport.write(wire.answer(msgspec.json.encode(found)))


class Connection(asyncio.Protocol):
    """A router's connection to an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox = wire.Inbox()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        for path, body in self._inbox.feed(data):
            self._engine.respond(path, body, self._transport)


async def serve(count: int, tick_s: float, tokens: Tokens | None) -> tuple[list[Engine], Ticker]:
    """``count`` engines on free ports."""
    ticker = Ticker(tick_s)
    engines = [Engine(ticker, tokens) for _ in range(count)]
    for engine in engines:
        server = await asyncio.get_running_loop().create_server(lambda e=engine: Connection(e), "127.0.0.1", 0)  # type: ignore[misc]
        engine.port = server.sockets[0].getsockname()[1]
    return engines, ticker


async def main(count: int, tick_s: float, *membership: str) -> None:
    control, key_file, roles, model = membership or ("", "", "", "")
    engines, ticker = await serve(count, tick_s, load_tokens(Path(model)) if model else None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ticker.run())
        for number, (engine, role) in enumerate(zip(engines, roles, strict=False)):
            key = read_key(Path(key_file))
            name = f"{role}{number}"
            engine.holder = Holder(worker(name, ROLES[role], f"http://127.0.0.1:{engine.port}"), control, key)
            engine.store = Holder(store(name), control, key)
            tasks.create_task(engine.store.feed.run())
            tasks.create_task(engine.holder.feed.run())
        print(json.dumps([engine.port for engine in engines]), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]))
