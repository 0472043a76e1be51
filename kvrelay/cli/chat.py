"""A small client of the OpenAI API: asks one question, hands out the answer while it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import aiohttp

from kvrelay.errors import Lost, Refused

_TIMEOUT = aiohttp.ClientTimeout(total=600, connect=5)


class ChatClient:
    """``async with ChatClient(url) as client``. Raises ``Lost`` when nobody answers, ``Refused`` on an error answer."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.request_id = ""
        """Id of the last question."""

    def __repr__(self) -> str:
        return f"<ChatClient {self._url}>"

    async def __aenter__(self) -> ChatClient:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=_TIMEOUT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def model(self) -> str:
        """The first model that is served."""
        answer = await self._get("/v1/models")
        models = answer.get("data") or []
        if not models:
            raise Lost(f"{self._url} serves no model yet; see {self._url}/health")
        return str(models[0]["id"])

    async def timeline(self) -> dict[str, Any]:
        """The record of the last question."""
        return await self._get(f"/kvrelay/requests/{self.request_id}")

    async def ask(self, question: str, *, max_tokens: int, temperature: float = 0.0) -> AsyncIterator[str]:
        """The answer, piece by piece."""
        body = {
            "model": await self.model(),
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
        }
        try:
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as response:
                await self._check(response)
                self.request_id = response.headers.get("x-request-id", "")
                async for line in response.content:
                    piece = _piece(line)
                    if piece is None:
                        return
                    if piece:
                        yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Lost(f"the answer of {self._url} broke off: {error}") from error

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._http.get(f"{self._url}{path}") as response:
                await self._check(response)
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Lost(f"nothing answers at {self._url} ({error}); start a cluster: kvrelay up") from error

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            raise Refused(f"{response.url.path} answered {response.status}: {_message(await response.text())}")


def _piece(line: bytes) -> str | None:
    """The text of one server-sent event; None at the end of the stream, empty for anything else."""
    text = line.decode().strip()
    if not text.startswith("data:"):
        return ""
    data = text.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    event = json.loads(data)
    if "error" in event:
        raise Refused(f"the answer ended with an error: {_message(data)}")
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _message(body: str) -> str:
    """The message inside an OpenAI error body, or the body itself."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:500]
