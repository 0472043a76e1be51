"""One streamed completion and when each of its tokens came. It decides nothing and knows no hand-off."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from kvrelay.types import Value

MODEL = "smollm2"
"""Served name of every engine here."""


class Answer(Value, frozen=True, kw_only=True):
    """When the events of one stream came, on this process's monotonic clock."""

    request_id: str
    sent_s: float
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Every inter-token latency."""
        return [after - before for before, after in itertools.pairwise(self.token_s)]


def completion(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy, streamed completion of exactly ``max_tokens`` tokens."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    return {**body, "ignore_eos": True, "stream": True, **more}


async def stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any], request_id: str = "") -> Answer:
    """Ask, and note when each event comes. Raises ``RuntimeError`` on any other status than 200."""
    sent_s = time.monotonic()
    async with http.post(f"{url}/v1/completions", json=body, headers=_named(request_id)) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        token_s = [time.monotonic() async for line in response.content if line.startswith(b"data: {")]
        request_id = response.headers.get("x-request-id", "")
    if not token_s:
        raise RuntimeError(f"{url} answered without a token")
    return Answer(request_id=request_id, sent_s=sent_s, token_s=tuple(token_s))


async def whole(http: aiohttp.ClientSession, url: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
    """Ask without a stream. Raises ``RuntimeError`` on any other status than 200."""
    async with http.post(
        f"{url}/v1/completions", json={**body, "stream": False}, headers=_named(request_id)
    ) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        answer: dict[str, Any] = await response.json()
        return answer


def _named(request_id: str) -> dict[str, str]:
    return {"X-Request-Id": request_id} if request_id else {}
