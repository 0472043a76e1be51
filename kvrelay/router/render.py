"""Asks a worker to tokenise: for requests that the router does not render itself, and to check that the router's own
rendering is the worker's. It must never trust the router's own once a worker's differed."""

from __future__ import annotations

import logging
from enum import StrEnum

import msgspec

from kvrelay.errors import Lost, Malformed
from kvrelay.router.failures import Rejected, blames_client
from kvrelay.router.request import ClientRequest, Kind
from kvrelay.router.tokens import Tokens
from kvrelay.router.upstream import MAX_ERROR_BYTES, Upstream
from kvrelay.types import WorkerInfo

log = logging.getLogger("kvrelay.router")

_NOT_OFFERED = frozenset({401, 403, 404, 405, 501})
"""Statuses of a worker without ``--enable-scale-out``."""

_TEXTS = ("Hello", "  Two  spaces,\ttabs,\nlines\n\n and numbers 1234567.", "Grüße, 世界 🌍 é</s><|im_end|>")
_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Grüße,\n世界 🌍 "},
        {"role": "assistant", "content": "Hi!\n"},
        {"role": "user", "content": "<b>1 + 1</b> = ?"},
    ],
)


class Trust(StrEnum):
    """Whether the router's own rendering of one kind of request may be used."""

    PENDING = "pending"
    """No worker was asked yet."""
    CHECKED = "checked"
    UNCHECKED = "unchecked"
    """No worker offers to render."""
    DIFFERS = "differs"
    """A worker rendered otherwise: never trusted again."""

    @property
    def usable(self) -> bool:
        return self in (Trust.CHECKED, Trust.UNCHECKED)


class Rendered(msgspec.Struct, frozen=True):
    """What a worker made of a request, as far as the router reads it."""

    token_ids: list[int]
    features: object = None
    """Images and the like; None for text."""


_reader = msgspec.json.Decoder(Rendered | list[Rendered])


class Renderer:
    """Renders at workers, and knows how far the router's own rendering can be trusted."""

    def __init__(self, upstream: Upstream, tokens: Tokens) -> None:
        self._upstream = upstream
        self._tokens = tokens
        self.trust = dict.fromkeys(Kind, Trust.PENDING)

    def __repr__(self) -> str:
        return f"<Renderer {', '.join(f'{kind.value} {trust.value}' for kind, trust in self.trust.items())}>"

    async def render(self, request: ClientRequest, worker: WorkerInfo) -> list[Rendered]:
        """One entry per prompt. Raises ``Rejected`` when the request is wrong, ``Lost`` when ``worker`` cannot say."""
        return await self._ask(request.kind, request.body | {"mm_payload": "none"}, worker)

    async def _ask(self, kind: Kind, body: dict[str, object], worker: WorkerInfo) -> list[Rendered]:
        reply = await self._upstream.post(f"{worker.url}{kind.path}/render", msgspec.json.encode(body))
        if reply.status != 200:
            answer = await reply.read(MAX_ERROR_BYTES)
            if reply.status not in _NOT_OFFERED and blames_client(reply.status):
                raise Rejected(reply.status, answer)
            raise Lost(f"{worker.name} does not render (status {reply.status}); start it with --enable-scale-out")
        try:
            rendered = _reader.decode(await reply.read())
        except msgspec.DecodeError as error:
            raise Lost(f"{worker.name} rendered something unreadable: {error}") from error
        return rendered if isinstance(rendered, list) else [rendered]

    async def check(self, worker: WorkerInfo) -> None:
        """Compare the router's own rendering with that of a worker that just registered."""
        for kind in Kind:
            if self.trust[kind] is not Trust.DIFFERS:
                self.trust[kind] = await self._compare(kind, worker)
            if self.trust[kind] is Trust.DIFFERS:
                log.warning("%s renders a %s otherwise than this router; workers render from now on", worker.name, kind)

    async def _compare(self, kind: Kind, worker: WorkerInfo) -> Trust:
        probes = _CHATS if kind is Kind.CHAT else _TEXTS
        field = "messages" if kind is Kind.CHAT else "prompt"
        try:
            for probe in probes:
                body: dict[str, object] = {"model": worker.model, field: probe, "max_tokens": 1}
                theirs = await self._ask(kind, body, worker)
                if [entry.token_ids for entry in theirs] != [await self._own(probe)]:
                    return Trust.DIFFERS
        except (Malformed, Rejected):
            # One side refuses what the other takes, or both do (a model without a chat template): workers decide.
            return Trust.DIFFERS
        except Lost:
            return self.trust[kind] if self.trust[kind] is Trust.CHECKED else Trust.UNCHECKED
        return Trust.CHECKED

    async def _own(self, probe: str | list[dict[str, str]]) -> list[int]:
        if isinstance(probe, str):
            return await self._tokens.encode(probe, special=True)
        return await self._tokens.encode_chat(probe)
