"""Pushes that a router orders: pages that are here go to another store, where a prompt will be computed. It must never
make an arena for them, nor take room from the hand-offs of this node's workers."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.errors import KvrelayError, Overloaded, Refused
from kvrelay.protocol.client import OpenTransfer
from kvrelay.protocol.feed import PushOrder
from kvrelay.store.keeper import Keeper
from kvrelay.store.peers import Peers

MAX_OPEN = 256
"""Pushes of orders at a time; more are refused."""


class Orders:
    """All orders of one store; they outlive the link of the router that gave them."""

    def __init__(self, keeper: Keeper, peers: Peers, clock: Callable[[], float]) -> None:
        self._keeper = keeper
        self._peers = peers
        self._clock = clock
        self._writer = keeper.join("routers", clock())

    def __repr__(self) -> str:
        return f"<Orders {self.open} open>"

    @property
    def open(self) -> int:
        """Pushes that are under way for routers."""
        return sum(transfer.is_open and transfer.opener is self._writer for transfer in self._keeper.transfers)

    def take(self, order: PushOrder) -> None:
        """Push what is here. The routers hear how it ends, also when it cannot begin."""
        now = self._clock()
        if self._keeper.transfers.get(order.transfer) is not None:
            self._keeper.counts.add("push_orders_refused")
            return  # a second end of that transfer would be told
        try:
            self._begin(order, now)
        except KvrelayError as error:
            self._keeper.counts.add("push_orders_refused")
            self._keeper.transfers.not_opened(order.transfer, error, now)

    def _begin(self, order: PushOrder, now: float) -> None:
        shelf = self._keeper.room.shelves.get(order.format)
        if shelf is None:
            raise Refused("no page of that format is here")
        if self.open >= MAX_OPEN:
            raise Overloaded(f"{MAX_OPEN} pushes for routers are open here already")
        if order.push_to == self._peers.advertised:
            raise Refused("a store pushes nothing to itself")
        opening = OpenTransfer(
            transfer=order.transfer,
            names=order.names,
            total_tokens=order.total_tokens,
            push_to=order.push_to,
            final=True,
        )
        self._peers.open(self._writer, opening, shelf, now)
        self._keeper.counts.add("push_orders")
