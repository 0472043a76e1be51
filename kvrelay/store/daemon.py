"""The store as a process: it listens to its node's clients and to other stores, and keeps its routers informed.

Nothing here waits on the disk or computes for long: one event loop serves everybody.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrelay.channel import Channel, Listener, bind_tcp, bind_unix, is_everywhere
from kvrelay.config import Config, StoreConfig
from kvrelay.errors import Lost, Misconfigured
from kvrelay.feed import Feed
from kvrelay.protocol.feed import Heartbeat, Neighbours, PushOrder, RegisterStore
from kvrelay.protocol.message import Message
from kvrelay.store.answers import Answers
from kvrelay.store.codecs import Codecs, check_codecs
from kvrelay.store.inbound import Inbound
from kvrelay.store.keeper import Keeper, incarnation
from kvrelay.store.orders import Orders
from kvrelay.store.paths.agent import Agent
from kvrelay.store.peers import Peers, is_loopback
from kvrelay.store.reception import Reception, probing_ground
from kvrelay.store.session import Session
from kvrelay.store.shelf import Shelf
from kvrelay.types import StoreInfo, Transport

_log = logging.getLogger(__name__)

Serve = Mapping[str, Callable[[Channel], Awaitable[None]]]
"""Who serves a link, by its purpose."""
TICK_S = 0.5
"""How late a lease, a transfer or a failed slot may end."""


class StoreDaemon:
    """One running store: state, listeners, links to peers, feed."""

    def __init__(self, config: Config, name: str, key: bytes, routers: tuple[str, ...], address: str) -> None:
        epoch = secrets.randbits(47) | 1
        self.info = StoreInfo(
            name=name, incarnation=incarnation(epoch), address=address, capacity_bytes=config.store.arena_bytes
        )
        self._loop = asyncio.get_running_loop()
        self._key = key
        self._stall_s = config.store.stalled_push_s
        self.keeper = Keeper(name, config.store, epoch, lambda event: self._feed.post(event))
        self.keeper.links = self._links
        self._feed = self._feed_to(routers, config.cluster.heartbeat_s)
        self._listeners: list[Listener] = []
        self._watched: set[int] = set()
        self._tasks = asyncio.TaskGroup()
        self._probes = probing_ground(epoch)
        self._agent = _agent(config.store, f"{name}/{epoch:x}")
        self.codecs = Codecs(config.store, self._loop.time, self._spawn)
        self.peers = Peers(
            self.keeper,
            config.store,
            key,
            address,
            self.codecs,
            self._loop.time,
            self._spawn,
            self._probes,
            self._agent,
        )
        self._orders = Orders(self.keeper, self.peers, self._loop.time)

    def _feed_to(self, routers: tuple[str, ...], heartbeat_s: float) -> Feed:
        return Feed(
            routers,
            self._key,
            sender=self.info.name,
            registration=RegisterStore(store=self.info),
            heartbeat=self._heartbeat,
            heartbeat_s=heartbeat_s,
            heard=self._heard,
            pages=self.keeper.page_log,
        )

    def __repr__(self) -> str:
        return f"<StoreDaemon {self.info.name} at {self.info.address}, {self._listeners}, {self._feed!r}>"

    async def run(self, local: socket.socket, remote: socket.socket, ready: Callable[[StoreInfo], None]) -> None:
        """Serve until cancelled, or until one of its tasks dies: a half-dead store must not look alive."""
        reception = Reception(self.keeper.room, local.getsockname(), self._probes, self._agent)
        answer = partial(Answers(self.keeper, self.peers, self._loop.time).serve, stall_s=self._stall_s)
        from_here: Serve = {"client": self._serve_client, "map": reception.serve_map, "inquiry": answer}
        from_peers: Serve = {
            "peer": partial(self._serve_peer, reception),
            "data": reception.serve_data,
            "inquiry": answer,
        }
        self._listeners = [self._listener(local, from_here), self._listener(remote, from_peers)]
        try:
            async with self._tasks:
                for listener in self._listeners:
                    self._spawn(listener.run())
                self._spawn(self._feed.run())
                self._spawn(self._tick())
                ready(self.info)
        finally:
            for fd in self._watched:
                self._loop.remove_reader(fd)
            if self._agent is not None:
                self._agent.close()
            self._probes.close()
            self.keeper.room.close()

    def _listener(self, sock: socket.socket, serve: Serve) -> Listener:
        return Listener(
            sock, self._key, receiver=self.info.name, purposes=serve, serve=lambda link: serve[link.purpose](link)
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    async def _serve_client(self, link: Channel) -> None:
        await Session(link, self.keeper, self.peers, self._loop.time, self._watch).serve()

    async def _serve_peer(self, reception: Reception, link: Channel) -> None:
        await Inbound(link, self.keeper, reception, self.codecs, self._stall_s, self._loop.time).serve()

    def _watch(self, shelf: Shelf) -> None:
        if shelf.doorbell.fd not in self._watched:
            self._watched.add(shelf.doorbell.fd)
            self._loop.add_reader(shelf.doorbell.fd, self._answer, shelf)

    def _answer(self, shelf: Shelf) -> None:
        shelf.doorbell.answer()
        self.keeper.progress(self._loop.time())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.keeper.tick(self._loop.time())
            await self._warm()

    async def _warm(self) -> None:
        """Give free slots their memory while nobody waits for them."""
        room = self.keeper.room
        for shelf in list(room.shelves.values()):
            while slots := room.begin_warming(shelf):
                await asyncio.to_thread(shelf.arena.populate, slots)
                shelf.end_warming(slots)

    def _links(self) -> dict[str, int]:
        return {
            "links_refused": sum(listener.refused for listener in self._listeners),
            "links_crashed": sum(listener.crashed for listener in self._listeners),
            "events_dropped": self._feed.dropped,
        }

    def _heard(self, message: Message) -> None:
        match message:
            case Neighbours():
                self.peers.meet(message.addresses)
            case PushOrder():
                self._orders.take(message)

    def _heartbeat(self) -> Heartbeat:
        healthy = all(listener.is_sound for listener in self._listeners)
        counts = self.keeper.describe()
        return Heartbeat(
            name=self.info.name,
            incarnation=self.info.incarnation,
            healthy=healthy,
            counts=counts,
            links=self.peers.reports,
        )


def _agent(config: StoreConfig, name: str) -> Agent | None:
    """NIXL's agent, where it is wanted, installed and able to start."""
    if Transport.NIXL not in config.transports or find_spec("nixl") is None:
        return None
    try:
        return Agent.create(name, only_loopback=is_loopback(config.peer_host))
    except Lost as error:
        _log.warning("%s; pages go by other ways", error)
        return None


def _bind_local(path: Path) -> socket.socket:
    try:
        return bind_unix(path)
    except OSError as error:
        why = "its folder does not exist" if not path.parent.is_dir() else error.strerror or str(error)
        raise Misconfigured(f"cannot listen at {path}: {why}; mend that or choose another socket (--socket)") from error


def _bind_remote(host: str, port: int) -> socket.socket:
    try:
        return bind_tcp(host, port)
    except OSError as error:
        why = error.strerror or str(error)
        raise Misconfigured(
            f"cannot listen on {host}:{port}: {why}; free it or set store.peer_host and store.peer_port"
        ) from error


async def run_store(
    config: Config,
    *,
    name: str,
    socket_path: Path,
    key: bytes,
    routers: tuple[str, ...],
    ready: Callable[[StoreInfo], None] | None = None,
) -> None:
    """Serve until cancelled. Raises ``Misconfigured``, also when an address is taken."""
    if is_everywhere(config.store.peer_host) and not config.store.advertise:
        raise Misconfigured("store.peer_host means every address: set store.advertise to the one that others can reach")
    check_codecs(config.store)
    with _bind_local(socket_path) as local, _bind_remote(config.store.peer_host, config.store.peer_port) as remote:
        host, port = remote.getsockname()
        daemon = StoreDaemon(config, name, key, routers, config.store.advertise or f"{host}:{port}")
        gc.collect()
        gc.freeze()  # modules live as long as the process: to look through them holds up the store for 20 ms
        try:
            await daemon.run(local, remote, ready or (lambda info: None))
        finally:
            gc.unfreeze()
            socket_path.unlink(missing_ok=True)
