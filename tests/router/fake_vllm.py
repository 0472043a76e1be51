"""A server that answers like vLLM on real sockets, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvrelay.protocol.engine import PrefillLeg, read_handoff
from kvrelay.router.tokens import Tokens

Hook = Callable[[PrefillLeg], Awaitable[None]]
MOST_SALT_CHARACTERS = 128
FORBIDDEN_IN_SALTS = frozenset("@/\\\x00")
"""vLLM 0.32 refuses others with 400."""


@dataclass
class FakeVllm:
    """What it was asked, and how it is to answer."""

    tokens: Tokens
    model: str = "tiny"
    words: list[str] = field(default_factory=lambda: ["one", " two", " three"])
    cached_tokens: int = 0
    url: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    """What callers showed."""
    aborted: int = 0
    refuse: int = 0
    """Status of every answer; 0: answer properly."""
    refusal: bytes = b'{"error":{"message":"no","type":"x","param":null,"code":0}}'
    reset: bool = False
    """Cut the connection instead of answering."""
    die_after: int | None = None
    """Cut the stream after so many words."""
    error_after: int | None = None
    """Send vLLM's error event, then ``[DONE]``, after so many words."""
    error_code: int = 500
    renders: bool = True
    render_shift: int = 0
    render_status: int = 0
    """Status of every rendering; 0: render properly."""
    transfer: object = None
    """What it tells of the hand-off in whole answers."""
    hold_render: asyncio.Event = field(default_factory=asyncio.Event)
    """Rendering waits for this."""
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers wait for this (prefill, and decode's first word)."""
    hold_words: asyncio.Event = field(default_factory=asyncio.Event)
    """Streams wait for this after their first word."""
    hold_end: asyncio.Event = field(default_factory=asyncio.Event)
    """The end of a stream's body waits for this after its last event."""
    on_prefill: Hook | None = None
    in_flight: int = 0
    connections: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hold.set()
        self.hold_words.set()
        self.hold_end.set()
        self.hold_render.set()

    def bodies(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = json.loads(await http.read())
        self.calls.append((http.path, body))
        self.authorizations.add(http.headers.get("authorization"))
        assert http.transport is not None
        self.connections.add(http.transport.get_extra_info("peername"))
        self.in_flight += 1
        try:
            return await self._answer(http, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.reset:
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if self.refuse:
            return web.Response(status=self.refuse, body=self.refusal, content_type="application/json")
        if not _takes(body.get("cache_salt")):
            error = {"message": "Parameter 'cache_salt' must not be this", "code": 400}
            return web.json_response({"error": error}, status=400)
        leg = read_handoff(body.get("kv_transfer_params"))
        if isinstance(leg, PrefillLeg):
            if self.on_prefill is not None:
                await self.on_prefill(leg)
            await self.hold.wait()
            return web.json_response(self._whole(body, ["x"], "length"))
        await self.hold.wait()
        if body.get("stream"):
            return await self._stream(http, body)
        return web.json_response(self._whole(body, self.words, "stop"))

    def _usage(self, body: dict[str, Any], written: int) -> dict[str, Any]:
        prompt = body.get("prompt", "")
        count = len(prompt) if isinstance(prompt, list) else 7
        details = {"cached_tokens": self.cached_tokens}
        return {
            "prompt_tokens": count,
            "completion_tokens": written,
            "total_tokens": count + written,
            "prompt_tokens_details": details,
        }

    def _choice(self, http_chat: bool, text: str, reason: str | None) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if http_chat else {"text": text}
        return {"index": 0, "finish_reason": reason, **said}

    def _whole(self, body: dict[str, Any], words: list[str], reason: str) -> dict[str, Any]:
        choices = [self._choice("messages" in body, "".join(words), reason)]
        made = {"id": "x", "model": self.model, "choices": choices, "usage": self._usage(body, len(words))}
        return made | ({"kv_transfer_params": self.transfer} if self.transfer else {})

    async def _stream(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for count, word in enumerate(self.words):
            if count == self.die_after:
                assert http.transport is not None
                http.transport.abort()
                return response
            if count == self.error_after:
                error = json.dumps({"error": {"message": "no", "code": self.error_code}}, separators=(",", ":"))
                await response.write(f"data: {error}\n\ndata: [DONE]\n\n".encode())
                return response
            await response.write(b"data: " + json.dumps({"id": "x", "choices": [{"text": word}]}).encode() + b"\n\n")
            await self.hold_words.wait()
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"id": "x", "choices": [], "usage": self._usage(body, len(self.words))}
            await response.write(b"data: " + json.dumps(usage, separators=(",", ":")).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await self.hold_end.wait()
        return response

    async def render(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.calls.append((http.path, body))
        self.authorizations.add(http.headers.get("authorization"))
        await self.hold_render.wait()
        if self.render_status:
            return web.json_response({}, status=self.render_status)
        if not self.renders:
            return web.json_response({"error": {"message": "scale-out is off", "code": 403}}, status=403)
        if "messages" in body:
            if any("role" not in message for message in body["messages"]):
                return web.json_response({"error": {"message": "role is missing", "code": 400}}, status=400)
            return web.json_response({"token_ids": await self._chat_ids(body["messages"]), "features": None})
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        return web.json_response([{"token_ids": await self._ids(text)} for text in prompts])

    async def _ids(self, text: str) -> list[int]:
        return [token + self.render_shift for token in await self.tokens.encode(text, special=True)]

    async def _chat_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        flat = [{"role": message["role"], "content": _text(message["content"])} for message in messages]
        return [token + self.render_shift for token in await self.tokens.encode_chat(flat)]

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeVllm]:
        """Serve on a free port."""
        app = web.Application(client_max_size=1 << 30)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self.generate)
            app.router.add_post(path + "/render", self.render)
        app.router.add_post("/reset_prefix_cache", self.generate)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _takes(salt: str | None) -> bool:
    return salt is None or (0 < len(salt) <= MOST_SALT_CHARACTERS and not FORBIDDEN_IN_SALTS & set(salt))
