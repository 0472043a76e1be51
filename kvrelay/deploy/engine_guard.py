"""Lets only holders of the engine's key in: ASGI middleware that the engine's server loads by name.

vLLM's own check covers /v1, /v2, /inference and /cohere alone: /invocations, which completes like /v1, /tokenize,
/abort_requests and others would stay open. This must open no path that reads or changes a request.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from kvrelay.errors import Misconfigured

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Where the engine finds its key; never on the command line, which every user of the machine can read."""
OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Probes and Prometheus bring no key."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REFUSAL = b'{"error":{"message":"this engine answers its router only; ask the router","code":401}}'


class EngineGuard:
    """Wraps the engine's application; without a key it refuses to exist rather than let everybody in."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(API_KEY_VARIABLE, "")
        if not key:
            raise Misconfigured(f"{API_KEY_VARIABLE} is not set; start engines with `kvrelay worker`")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    def __repr__(self) -> str:
        return f"<EngineGuard, open: {', '.join(sorted(OPEN_PATHS))}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope) or self._holds_key(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)

    def _holds_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def _is_open(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in OPEN_PATHS


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSAL})
