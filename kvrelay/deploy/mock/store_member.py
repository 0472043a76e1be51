"""A mock store's name, and its lives: one after the other, each begins empty and with a feed of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from kvrelay.config import Config
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.mock.page_store import MockStore
from kvrelay.deploy.mock.wire import Later, Wire
from kvrelay.errors import Misconfigured
from kvrelay.feed import Feed
from kvrelay.protocol.feed import Heartbeat, PushOrder, RegisterStore
from kvrelay.protocol.message import Message
from kvrelay.race import until_one_ends
from kvrelay.types import PageFormat, StoreInfo

WIRE_LATENCY_S = 50e-6


class StoreMember:
    """Lives, and lives again, as its faults want it."""

    role = "store"

    def __init__(
        self,
        name: str,
        form: PageFormat,
        config: Config,
        *,
        routers: tuple[str, ...],
        key: bytes,
        later: Later,
        died: Callable[[MockStore], None],
        push: Callable[[MockStore, PushOrder], None],
    ) -> None:
        """``died`` hears of each death: what others expect of this store will not come. ``push`` does what a router
        orders it to push to another."""
        mock = config.mock
        info = StoreInfo(
            name=name,
            incarnation=_incarnation(),
            address=f"{name}.mock.invalid:1",  # nobody outside of this process can reach it
            capacity_bytes=mock.store_tokens * form.layers * form.token_layer_bytes,
        )
        wire = Wire(bytes_per_s=mock.link_bytes_per_s / mock.time_scale, latency_s=WIRE_LATENCY_S * mock.time_scale)
        self.name = name
        self.url = ""
        self.store = MockStore(info, form, wire=wire, later=later, emit=self._emit)
        self.faults = Faults()
        self._config = config
        self._routers = routers
        self._key = key
        self._changed = asyncio.Event()
        self._feed: Feed | None = None
        self._died = died
        self._push = push

    def __repr__(self) -> str:
        return f"<StoreMember {self.store!r}, {self._feed!r}>"

    def suffer(self, faults: Faults) -> None:
        """Have these faults from now on. Raises ``Misconfigured`` for those that a store cannot have."""
        if faults != Faults(dead=faults.dead, mute=faults.mute, full=faults.full, apart=faults.apart):
            raise Misconfigured("a mock store can be dead, mute, full or apart, and nothing else can be wrong with it")
        self.faults = faults
        self._obey()
        self._changed.set()

    def _obey(self) -> None:
        self.store.is_full, self.store.is_apart = self.faults.full, self.faults.apart
        if self._feed is not None:
            self._feed.mute(self.faults.mute)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self.faults.dead:
                await self._live()
            self.store.die()
            self._died(self.store)
            await self._until(dead=False)
            self.store.revive(_incarnation())

    async def _live(self) -> None:
        self._feed = feed = self._fed()
        self._obey()
        try:
            await until_one_ends(feed.run(), self._death(feed))
        finally:
            self._feed = None

    async def _death(self, feed: Feed) -> None:
        await self._until(dead=True)
        feed.silence()

    def _fed(self) -> Feed:
        return Feed(
            self._routers,
            self._key,
            sender=self.name,
            registration=RegisterStore(store=self.store.info),
            heartbeat=self._heartbeat,
            heartbeat_s=self._config.cluster.heartbeat_s,
            pages=self.store.log,
            heard=self._heard,
        )

    def _emit(self, message: Message) -> None:
        if self._feed is not None:
            self._feed.post(message)

    def _heard(self, message: Message) -> None:
        if isinstance(message, PushOrder):
            self._push(self.store, message)

    def _heartbeat(self) -> Heartbeat:
        info = self.store.info
        return Heartbeat(name=info.name, incarnation=info.incarnation, healthy=True, counts=self.store.counts())

    async def _until(self, *, dead: bool) -> None:
        while self.faults.dead is not dead:
            self._changed.clear()
            await self._changed.wait()


def _incarnation() -> str:
    return secrets.token_hex(4)
