"""What a router says of an answer that hangs, in words for whoever has to find out why. It must never hang itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec

ASKING_S = 10.0
MAX_CHARS = 4000
MAX_TOLD = 10
"""Answers that are asked about: a router that answers nobody must not be asked about all of them as well."""
_LEFT_OUT = frozenset({"decision", "actual"})
"""Why it went where it went: much, and of no use here."""


class Stories:
    """Asks the router at ``url``."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = f"{url}/kvrelay/requests"
        self._turn = asyncio.Lock()
        self._told = 0

    def __repr__(self) -> str:
        return f"<Stories from {self._url}>"

    async def of(self, request_id: str, age_s: float) -> str:
        """The story of the request that was sent ``age_s`` ago; without its id, of the one nearest in age that has not
        begun. Only the first ``MAX_TOLD`` calls get one; it is empty for others."""
        if self._told >= MAX_TOLD:
            return ""
        self._told += 1
        try:
            async with self._turn, asyncio.timeout(ASKING_S):
                record = await self._get(f"/{request_id}") if request_id else await self._nearest(age_s)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            return f"the router could not be asked ({type(error).__name__})"
        return tell(record)[:MAX_CHARS]

    async def _nearest(self, age_s: float) -> dict[str, Any]:
        """Whose head has not come has no id to ask by."""
        running = (await self._get("")).get("requests", [])
        not_begun = [each for each in running if not each["now"]["begun"]]
        nearest: dict[str, Any] = min(not_begun, key=lambda each: abs(each["age_s"] - age_s), default={})
        return await self._get(f"/{nearest['request_id']}") if nearest else {}

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._http.get(self._url + path) as response:
            record: dict[str, Any] = msgspec.json.decode(await response.read())
        return record


def tell(record: dict[str, Any]) -> str:
    """A sentence, and all that the router knows behind it."""
    known = {name: value for name, value in record.items() if name not in _LEFT_OUT}
    return f"{'; '.join(_sentences(record))}: {msgspec.json.encode(known).decode()}"


def _sentences(record: dict[str, Any]) -> Iterator[str]:
    now = record.get("now")
    if now is None:
        yield f"the router has no such request in flight (status {record.get('status')})"
    else:
        yield f"it waits for {now['waits_for']} {_for(now.get('waits_s'))}{_until(now.get('given_up_s'))}"
    if now is not None and now.get("decode"):
        yield f"its D is {_worker(now['decode'])}"
    for leg in (now or {}).get("prefills", ()):
        yield f"a prompt is {leg['state']} at {_worker(leg)}"
    for loss in record.get("resumptions", ()):
        yield f"{loss['lost_worker']} was lost at {loss['lost_at']:.1f} s ({loss['reason']})"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f"since {seconds:.1f} s"


def _until(seconds: float | None) -> str:
    return "" if seconds is None else f", at most {seconds:.1f} s"


def _worker(told: dict[str, Any]) -> str:
    if not told.get("known", True):
        return f"{told['worker']}, which is unknown"
    usable = "usable" if told["usable"] else "not usable"
    return f"{told['worker']} ({usable}, heard {told['heard_s']:.1f} s ago, progress {told['progress_s']:.1f} s ago)"
