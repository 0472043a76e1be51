"""Asks a worker to tokenise: for requests that the router does not render itself, and to check that the router's own
rendering is that of a model's workers. It must never trust the router's own unless it was compared, for this model."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum

import msgspec

from kvrelay.errors import Exhausted, Lost, Malformed
from kvrelay.policy.patience import RENDER_S
from kvrelay.router.failures import Rejected, blames_client
from kvrelay.router.request import ClientRequest, Kind
from kvrelay.router.tokens import Tokens
from kvrelay.router.upstream import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, Upstream
from kvrelay.types import WorkerInfo

log = logging.getLogger("kvrelay.router")

_NOT_OFFERED = frozenset({403, 404, 405, 501})
"""Statuses of a worker without ``--enable-scale-out``."""

MAX_COMPARED = 1024

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
    """What is known of the router's own rendering of one kind of request for one model; only CHECKED is used."""

    PENDING = "pending"
    """No worker has answered yet."""
    CHECKED = "checked"
    UNCHECKED = "unchecked"
    """The workers do not offer to render."""
    DIFFERS = "differs"
    """A worker rendered otherwise: never trusted again."""


class _NotOffered(Lost):
    """The worker has no such route."""


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
        self._trust: dict[tuple[str, Kind], Trust] = {}
        self._compared: dict[str, str] = {}
        """Incarnation of each worker that was compared."""
        self._comparing: set[str] = set()

    def __repr__(self) -> str:
        known = [f"{model} {kind.value} {trust.value}" for (model, kind), trust in self._trust.items()]
        return f"<Renderer {', '.join(known) or 'compared with nobody'}>"

    def trust(self, model: str, kind: Kind) -> Trust:
        """Whether the router's own rendering for ``model`` may be used."""
        return self._trust.get((model, kind), Trust.PENDING)

    async def render(self, request: ClientRequest, worker: WorkerInfo) -> list[Rendered]:
        """One entry per prompt. Raises ``Rejected`` when the request is wrong, ``Lost`` when ``worker`` cannot say,
        ``Exhausted``."""
        return await self._ask(request.kind, request.body | {"mm_payload": "none"}, worker)

    async def _ask(self, kind: Kind, body: dict[str, object], worker: WorkerInfo) -> list[Rendered]:
        try:
            async with asyncio.timeout(RENDER_S):
                status, answer = await self._post(f"{worker.url}{kind.path}/render", msgspec.json.encode(body))
        except TimeoutError as error:
            raise Lost(f"{worker.name} did not render within {RENDER_S:g} s") from error
        if status in _NOT_OFFERED:
            raise _NotOffered(f"{worker.name} does not render (status {status}); start it with --enable-scale-out")
        if blames_client(status):
            raise Rejected(status, answer)
        if status != 200:
            raise Lost(f"{worker.name} could not render (status {status})")
        try:
            rendered = _reader.decode(answer)
        except msgspec.DecodeError as error:
            raise Lost(f"{worker.name} rendered something unreadable: {error}") from error
        return rendered if isinstance(rendered, list) else [rendered]

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        reply = await self._upstream.post(url, body)
        try:
            return reply.status, await reply.read(MAX_ANSWER_BYTES if reply.status == 200 else MAX_ERROR_BYTES)
        finally:
            reply.close()

    def wants(self, worker: WorkerInfo) -> bool:
        """This incarnation was not compared yet, nor is it just now."""
        return worker.name not in self._comparing and self._compared.get(worker.name) != worker.incarnation

    async def check(self, worker: WorkerInfo) -> None:
        """Compare the router's own rendering with that of ``worker``; one that cannot answer is asked again later."""
        if not self.wants(worker):
            return
        if len(self._compared) >= MAX_COMPARED:
            # Names of workers that came and went: what is forgotten is compared anew, and not trusted until then.
            self._compared.clear()
            self._trust.clear()
        self._comparing.add(worker.name)
        try:
            for kind in Kind:
                self._judge(worker, kind, await self._compare(kind, worker))
        except (Lost, Exhausted) as error:
            log.info("%s; asking again at its next heartbeat", error)
            return
        finally:
            self._comparing.discard(worker.name)
        self._compared[worker.name] = worker.incarnation

    def _judge(self, worker: WorkerInfo, kind: Kind, found: Trust) -> None:
        """A difference outweighs everything, and who does not offer to render says nothing."""
        known = self.trust(worker.model, kind)
        if known is Trust.DIFFERS or (known is Trust.CHECKED and found is Trust.UNCHECKED):
            return
        self._trust[worker.model, kind] = found
        if found is Trust.DIFFERS:
            log.warning("%s renders a %s otherwise than this router; workers render from now on", worker.name, kind)

    async def _compare(self, kind: Kind, worker: WorkerInfo) -> Trust:
        """How ``worker`` renders the probes. Raises ``Lost``, ``Exhausted`` when it cannot say now."""
        if self.trust(worker.model, kind) is Trust.DIFFERS:
            return Trust.DIFFERS
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
        except _NotOffered:
            return Trust.UNCHECKED
        return Trust.CHECKED

    async def _own(self, probe: str | list[dict[str, str]]) -> list[int]:
        if isinstance(probe, str):
            return await self._tokens.encode(probe, special=True)
        return await self._tokens.encode_chat(probe)
