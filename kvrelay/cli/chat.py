"""A small client of the OpenAI API: asks one question, hands out the answer while it comes."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import aiohttp

from kvrelay.deploy.command import program
from kvrelay.errors import Lost, Misconfigured, Refused

_LOOKS = 40
_LOOK_S = 0.05
_REPLICA_TRIES = 32
"""The kernel chooses a replica for each connection: so many leave one of four out once in 10,000 times."""
_TIMEOUT = aiohttp.ClientTimeout(total=600, connect=5)


class ChatClient:
    """``async with ChatClient(url) as client``. Raises ``Misconfigured`` when ``url`` is none, ``Lost`` when
    nobody answers, ``Refused`` on an error answer."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = _base(url)
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
            raise Lost(f"{self._url} serves no model yet: wait while its workers start, or see {self._url}/health")
        return str(models[0]["id"])

    async def timeline(self, request_id: str = "") -> dict[str, Any]:
        """The record of a request; of the last question when none is named."""
        # A command line may hold bytes that are no text, which the router does not know either, and says so.
        name = urllib.parse.quote(request_id or self.request_id, safe="", errors="surrogateescape")
        return await self._get(f"/kvrelay/requests/{name}", tries=_REPLICA_TRIES)

    async def whole_timeline(self) -> dict[str, Any]:
        """The record of the last question once the router has closed it, a moment after the answer's last word; as far
        as it is known when that takes too long."""
        for _look in range(_LOOKS):
            record = await self.timeline()
            if "finished" in record.get("events", {}):
                break
            await asyncio.sleep(_LOOK_S)
        return record

    async def unready(self) -> list[str]:
        """Workers and stores that get no work now; none where nobody tells."""
        try:
            async with self._http.get(f"{self._url}/health") as response:
                tree = await response.json()
            return [each["name"] for each in [*tree["workers"], *tree["stores"]] if not each["ready"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return []

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
            raise self._broken_off() from error
        raise self._broken_off()  # the stream ended without its end mark

    def _broken_off(self) -> Lost:
        return Lost(f"the answer broke off: the router at {self._url} is gone; ask again once it is back")

    async def _get(self, path: str, *, tries: int = 1) -> dict[str, Any]:
        """``tries``: where somebody knows nothing of it, ask again over a new connection, at which another replica may
        sit."""
        headers = {"connection": "close"} if tries > 1 else {}
        try:
            async with self._http.get(f"{self._url}{path}", headers=headers) as response:
                if response.status != 404 or tries == 1:
                    await self._check(response)
                    answer: dict[str, Any] = await response.json()
                    return answer
        except aiohttp.ClientSSLError as error:
            plain = self._url.replace("https:", "http:", 1)
            raise Lost(f"no TLS is to be had at {self._url} ({error.strerror or error}); try --url {plain}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Lost(f"nothing answers at {self._url}; start a cluster: {program()} up") from error
        except ValueError as error:
            raise self._no_router() from error
        return await self._get(path, tries=tries - 1)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 401:
            wrong = "does not know this API key" if "Authorization" in self._headers else "wants an API key"
            raise Refused(f"the router at {self._url} {wrong}; give one with --api-key KEY or KVRELAY_API_KEY")
        if response.status != 200:
            told = _message(await response.text())
            if told is None:
                raise self._no_router(f", which answered {response.status} to {response.url.path},")
            raise Refused(f"{response.url.path} answered {response.status}: {told}")

    def _no_router(self, what: str = "") -> Lost:
        return Lost(f"what answers at {self._url}{what} is no router of kvrelay; give --url the one of a cluster")


def _base(url: str) -> str:
    """``url`` without the /v1 that other clients want at its end."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise Misconfigured(f"--url {url} is no URL; it looks like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


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
        raise Refused(f"the answer broke off: {_message(data) or data[:500]}")
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _message(body: str) -> str | None:
    """The message inside an OpenAI error body; None when it is no such body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return None
