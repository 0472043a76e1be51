"""Reads clients' bodies as they arrive. It must never keep room for what has not arrived yet: whoever only announces a
long body, and sends none, would keep others out."""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader, web

from kvrelay.errors import BadRequest
from kvrelay.router.bodies import Claim

BODY_S = 60.0
"""Longest time a client may take to send its body."""
GRACE_S = 10.0
"""Time in which a body may come as slowly as it likes."""
MIN_BYTES_PER_S = 32 << 10
"""Least mean speed of the body so far, after ``GRACE_S``."""


class Intake:
    """Reads bodies of at most ``max_body_bytes``."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes

    def __repr__(self) -> str:
        return f"<Intake, {self._max_body_bytes} bytes a body>"

    async def read(self, http: web.Request, claim: Claim) -> bytes:
        """The body of ``http``, for which ``claim`` then holds room. Raises ``BadRequest``, ``Overloaded``."""
        body = await self._read(http, claim)
        if "content-encoding" in http.headers and http.content_length != 0 and not body.rstrip().endswith(b"}"):
            # aiohttp unpacks what came of a packed body, and does not tell whether its end did.
            raise BadRequest("the packed body is cut off, or does not hold a JSON object; send all of it")
        return body

    async def _read(self, http: web.Request, claim: Claim) -> bytes:
        if (http.content_length or 0) > self._max_body_bytes:
            raise self._too_long()
        try:
            if not http.content.is_eof():
                return await self._arriving(http.content, claim)
            body = await http.read()  # nearly always: a timer costs more than to read what is here
        except web.HTTPRequestEntityTooLarge as error:
            raise self._too_long() from error
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body could not be read ({error}); send it again") from error
        claim.grow(len(body))
        return body

    async def _arriving(self, content: StreamReader, claim: Claim) -> bytes:
        body = bytearray()
        start_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(start_s + min(GRACE_S, BODY_S)) as end:
                while chunk := await content.readany():
                    body += chunk
                    if len(body) > self._max_body_bytes:
                        raise self._too_long()
                    claim.grow(len(body))
                    end.reschedule(start_s + min(GRACE_S + len(body) / MIN_BYTES_PER_S, BODY_S))
        except TimeoutError as error:
            slow = f"{BODY_S:g} s, or came with less than {MIN_BYTES_PER_S} bytes/s for {GRACE_S:g} s"
            raise BadRequest(f"the body did not arrive within {slow}; send it faster", status=408) from error
        return bytes(body)

    def _too_long(self) -> BadRequest:
        limit = f"the body is over the limit of {self._max_body_bytes} bytes"
        return BadRequest(f"{limit}; send less, or raise router.max_body_bytes", status=413)
