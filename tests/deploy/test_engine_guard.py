"""Tests of deploy/engine_guard.py: who gets past it, as ASGI calls it."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.deploy.engine_guard import API_KEY_VARIABLE, EngineGuard
from kvrelay.errors import Misconfigured

KEY = "0123456789abcdef"


async def status_of(path: str, *authorization: str, kind: str = "http", method: str = "GET") -> int:
    """200 when the application behind the guard was reached."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def receive() -> Any:
        raise AssertionError("a refused request is not read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"x"), *((b"authorization", value.encode()) for value in authorization)]
    await EngineGuard(app)({"type": kind, "method": method, "path": path, "headers": headers}, receive, send)
    return int(sent[0].get("status") or sent[0]["code"])


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/inference/v1/generate", "/invocations", "/tokenize", "/docs", "/", "/health/x"]
)
async def test_every_path_that_does_something_needs_the_key(path: str) -> None:
    assert await status_of(path) == 401
    assert await status_of(path, f"Bearer {KEY}") == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_need_no_key(path: str) -> None:
    assert await status_of(path) == 200
    assert await status_of(path, method="POST") == 401


@pytest.mark.parametrize("shown", ["", "Bearer", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xfc"])
async def test_a_wrong_key_is_refused(shown: str) -> None:
    assert await status_of("/v1/models", shown) == 401


async def test_a_right_key_beside_a_wrong_one_is_refused() -> None:
    assert await status_of("/v1/models", f"Bearer {KEY}", "Bearer x") == 401


async def test_options_and_websockets_need_the_key_too() -> None:
    assert await status_of("/v1/completions", method="OPTIONS") == 401
    assert await status_of("/v1/realtime", kind="websocket") == 1008
    assert await status_of("/v1/realtime", f"Bearer {KEY}", kind="websocket") == 200


async def test_an_engine_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(Misconfigured, match="VLLM_API_KEY is not set"):
        await status_of("/health")
