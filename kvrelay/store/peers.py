"""Which other stores this one may push to, and the link to each. It must never dial an address outside that list."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Coroutine, Iterable
from importlib.util import find_spec
from typing import Any

from kvrelay.channel import split_address
from kvrelay.config import StoreConfig
from kvrelay.errors import Barred, KvrelayError, Overloaded, Refused
from kvrelay.protocol.client import LinkReport, OpenTransfer
from kvrelay.store.arena import Arena
from kvrelay.store.codecs import Codecs
from kvrelay.store.keeper import Keeper
from kvrelay.store.outbound import Outbound
from kvrelay.store.page import Writer
from kvrelay.store.paths.agent import Agent
from kvrelay.store.paths.choice import Opener, Openers
from kvrelay.store.paths.onesided import OneSided
from kvrelay.store.paths.shm import SharedMemory
from kvrelay.store.paths.streams import Streams
from kvrelay.store.push import Push
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer, Way
from kvrelay.types import NIXL_MISSING, PageFormat, Transport

MAX_PEERS = 256
MAX_PUSHED_PAGES = 200_000
"""Of one transfer: their names must fit into one message to the peer, beside the format."""


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
        codecs: Codecs,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        probes: Arena,
        agent: Agent | None,
    ) -> None:
        self.advertised = advertised
        self._probes = probes
        self._agent = agent
        self._keeper = keeper
        self._config = config
        self._key = key
        self._codecs = codecs
        self._clock = clock
        self._spawn = spawn
        self._links: dict[str, Outbound] = {}

    def __repr__(self) -> str:
        return f"<Peers of {self.advertised}: {list(self._links.values())}>"

    @property
    def reports(self) -> list[LinkReport]:
        """What is known of the ways to all peers."""
        return [report for link in self._links.values() for report in link.reports]

    def meet(self, addresses: Iterable[str]) -> None:
        """All other stores of the cluster: have a link to each, and its paths tested, before the first push."""
        others = tuple(addresses)
        self._links = {known: link for known, link in self._links.items() if not link.is_over or known in others}
        for address in others:
            with contextlib.suppress(KvrelayError):  # not one that we may dial, or one too many
                if address != self.advertised:
                    self._check(address)
                    self.link(address)

    def open(self, opener: Writer, message: OpenTransfer, shelf: Shelf, now: float) -> None:
        """Start a transfer. Raises ``Barred``, ``Refused``, ``Malformed``, ``Overloaded`` when it cannot be."""
        stays = message.push_to in (None, self.advertised)
        if message.push_to is not None and not stays:
            self._check(message.push_to)
            if len(message.names) > MAX_PUSHED_PAGES:
                raise Refused(f"a transfer of {len(message.names)} pages is over the limit of {MAX_PUSHED_PAGES}")
        way = Way.STAY if stays else Way.OUT
        transfer = self._keeper.open_transfer(
            message.transfer, opener, message.names, message.total_tokens, shelf, way, now
        )
        if transfer is None and self._keeper.transfers.get(message.transfer) is None:
            raise Overloaded("this store has too many open transfers")
        if transfer is not None and message.push_to is not None and not stays:
            self._push(transfer, message.push_to, shelf, now, final=message.final)

    def _push(self, transfer: Transfer, address: str, shelf: Shelf, now: float, *, final: bool) -> None:
        link = self.link(address)
        push = Push(transfer, shelf, self._keeper.catalog, is_bulk=final)
        link.add(push)
        self._keeper.pushes.add(push, shelf, link.wake, now)
        if final:
            self._keeper.pushes.expect_no_more(push)

    def link(self, address: str) -> Outbound:
        """The link to a peer, dialled when there is none. Raises ``Overloaded``."""
        link = self._links.get(address)
        if link is None or link.is_over:
            self._make_room(address)
            link = Outbound(
                address,
                self._key,
                self._keeper,
                self._config.stalled_push_s,
                self._openers(address),
                self._codecs,
                self._clock,
                self._spawn,
            )
            self._links[address] = link
            self._spawn(link.run())
        return link

    def _make_room(self, address: str) -> None:
        """For a link to ``address``. Those that are over tell what is wrong with their peers while there is room."""
        if address not in self._links and len(self._links) >= MAX_PEERS:
            self._links = {known: link for known, link in self._links.items() if not link.is_over}
            if len(self._links) >= MAX_PEERS:
                raise Overloaded(f"this store has links to {MAX_PEERS} peers already")

    def _openers(self, address: str) -> Openers:
        key, name, count = self._key, self._keeper.name, self._config.streams
        known: dict[Transport, Opener | str] = {
            Transport.SHM: lambda line, met: SharedMemory.open(line, key, name, met),
            Transport.NIXL: self._one_sided(),
            Transport.TCP: lambda line, met: Streams.open(line, address, key, name, met, count),
        }
        return {transport: opener for transport, opener in known.items() if transport in self._config.transports}

    def _one_sided(self) -> Opener | str:
        agent = self._agent
        if agent is not None:
            refused: set[PageFormat] = set()  # as long as the link lasts, however often the path is opened
            return lambda line, met: OneSided.open(line, agent, self._probes, refused)
        if find_spec("nixl") is None:
            return f"{NIXL_MISSING}; pip install 'kvrelay[nixl]'"
        return "NIXL does not start here; see the store's log"

    def _check(self, address: str) -> None:
        if not is_loopback(split_address(address)[0]) and address not in self._config.peers:
            raise Barred(f"{address} is not a peer of this store; add it to store.peers")
