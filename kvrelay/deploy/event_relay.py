"""Hears what an engine publishes of its KV cache, in order and without gaps, through unix sockets of this user alone.

It must never pass an event on after one that it missed: what was missed is asked for, or everything is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvrelay.deploy.engine_pages import EnginePages, KvEvent

logger = logging.getLogger(__name__)

REPLAY_WAIT_S = 5.0
"""Longest time in which the engine tells again what was missed; it looks for such questions ten times a second."""
MAX_REMEMBERED = 4096
"""Batches that are known again when they come twice: more than wait in a socket while as many are told again."""
_END = (1 << 64) - 1
"""Sequence number after the last batch that is told again."""


class Batch(msgspec.Struct, array_like=True):
    """What vLLM publishes after a step that changed its cache."""

    timestamp_s: float
    events: list[KvEvent]


_decoder = msgspec.msgpack.Decoder(Batch)


def publish(folder: Path) -> str:
    """Value of ``--kv-events-config`` for an engine whose events are heard in ``folder``."""
    settings = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": _events(folder),
        "replay_endpoint": _replay(folder),
    }
    return msgspec.json.encode(settings).decode()


def _events(folder: Path) -> str:
    return f"ipc://{folder}/events"


def _replay(folder: Path) -> str:
    return f"ipc://{folder}/replay"


class EventRelay:
    """Batches of one engine by their numbers: 0, 1, 2, ..."""

    def __init__(self, folder: Path, pages: EnginePages) -> None:
        self._folder = folder
        self._pages = pages
        self._next = 0
        self._heard: dict[int, int] = {}
        """Hashes of the last batches by number: clocks may be set back."""
        self.replays = 0
        """How often batches were missed and asked for."""
        self.losses = 0
        """How often what was missed was kept no more, or could not be read."""

    def __repr__(self) -> str:
        return f"<EventRelay at batch {self._next}, {self._pages!r}, {self.losses} losses>"

    def counts(self) -> dict[str, int]:
        """Counters for the heartbeat."""
        return {
            "event_replays": self.replays,
            "event_losses": self.losses,
            "blocks_unnamed": self._pages.unnamed,
            "block_overflows": self._pages.overflows,
        }

    async def run(self) -> None:
        """Relay until cancelled."""
        context = zmq.asyncio.Context()
        try:
            heard = context.socket(zmq.SUB)
            heard.connect(_events(self._folder))
            heard.subscribe(b"")
            await self._catch_up(context)  # what was published before we listened
            while True:
                _topic, number, payload = await heard.recv_multipart()
                await self._hear(context, int.from_bytes(number, "big"), payload)
        finally:
            context.destroy(linger=0)

    async def _hear(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        if number < self._next and self._is_news(number, payload):
            self._lose(0, "the engine began anew")
        if number > self._next:
            self.replays += 1
            await self._catch_up(context)
        if number > self._next:
            self._lose(number, "batches are kept no more")
        if number == self._next:
            self._apply(payload)

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Ask for everything from the next batch on."""
        asked = context.socket(zmq.DEALER)
        try:
            asked.connect(_replay(self._folder))
            await asked.send_multipart([b"", self._next.to_bytes(8, "big")])
            async with asyncio.timeout(REPLAY_WAIT_S):
                while True:
                    *_, number_bytes, payload = await asked.recv_multipart()
                    number = int.from_bytes(number_bytes, "big")
                    if number == _END:
                        return
                    if number > self._next:
                        self._lose(number, "batches are kept no more")
                    if number == self._next:
                        self._apply(payload)
        except TimeoutError:
            logger.warning("the engine did not tell again what was missed of its KV events")
        finally:
            asked.close(linger=0)

    def _is_news(self, number: int, payload: bytes) -> bool:
        """Whether a batch whose number was heard before is another one: each says when it was made."""
        return self._heard.get(number) != hash(payload)

    def _apply(self, payload: bytes) -> None:
        self._heard[self._next] = hash(payload)
        if len(self._heard) > MAX_REMEMBERED:
            del self._heard[next(iter(self._heard))]
        self._next += 1
        try:
            batch = _decoder.decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            self._lose(self._next, f"a batch cannot be read ({error})")
            return
        self._pages.take(batch.events)

    def _lose(self, number: int, why: str) -> None:
        """Go on with batch ``number`` although those before it are unknown."""
        logger.warning("the engine's KV events have a gap: %s; its pages are forgotten until it stores new ones", why)
        self.losses += 1
        self._next = number
        if number == 0:
            self._heard.clear()
        self._pages.forget()
