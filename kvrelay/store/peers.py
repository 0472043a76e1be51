"""Which other stores this one may push to, and the link to each. It must never dial an address outside that list."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine
from typing import Any

from kvrelay.channel import split_address
from kvrelay.config import StoreConfig
from kvrelay.errors import Overloaded, Refused
from kvrelay.protocol import OpenTransfer
from kvrelay.store.keeper import Keeper
from kvrelay.store.outbound import Outbound
from kvrelay.store.page import Writer
from kvrelay.store.push import Push
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer, Way

MAX_PEERS = 256


def is_loopback(host: str) -> bool:
    """Whether ``host`` cannot leave this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Peers:
    """Links to the stores that pages are pushed to, made when first needed."""

    def __init__(
        self,
        keeper: Keeper,
        config: StoreConfig,
        key: bytes,
        advertised: str,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.advertised = advertised
        self._keeper = keeper
        self._config = config
        self._key = key
        self._clock = clock
        self._spawn = spawn
        self._links: dict[str, Outbound] = {}

    def __repr__(self) -> str:
        return f"<Peers of {self.advertised}: {list(self._links.values())}>"

    def open(self, opener: Writer, message: OpenTransfer, shelf: Shelf, now: float) -> None:
        """Start a transfer. Raises ``Refused``, ``Malformed``, ``Overloaded`` when it cannot be."""
        stays = message.push_to in (None, self.advertised)
        if message.push_to is not None and not stays:
            self._check(message.push_to)
        way = Way.STAY if stays else Way.OUT
        transfer = self._keeper.open_transfer(
            message.transfer, opener, message.names, message.total_tokens, shelf, way, now
        )
        if transfer is None and self._keeper.transfers.get(message.transfer) is None:
            raise Overloaded("this store has too many open transfers")
        if transfer is not None and message.push_to is not None and not stays:
            self._push(transfer, message.push_to, shelf, now, final=message.final)

    def _push(self, transfer: Transfer, address: str, shelf: Shelf, now: float, *, final: bool) -> None:
        link = self._link(address)
        push = Push(transfer, shelf, self._keeper.catalog)
        link.add(push)
        self._keeper.pushes.add(push, shelf, link.wake, now)
        if final:
            self._keeper.pushes.expect_no_more(push)

    def _link(self, address: str) -> Outbound:
        link = self._links.get(address)
        if link is None or link.is_over:
            self._links = {known: link for known, link in self._links.items() if not link.is_over}
            if len(self._links) >= MAX_PEERS:
                raise Overloaded(f"this store has links to {MAX_PEERS} peers already")
            link = Outbound(address, self._key, self._keeper, self._config.stalled_push_s, self._clock)
            self._links[address] = link
            self._spawn(link.run())
        return link

    def _check(self, address: str) -> None:
        host, _port = split_address(address)
        if not is_loopback(host) and address not in self._config.peers:
            raise Refused(f"{address} is not a peer of this store; add it to store.peers")
