"""A cluster of real engines whose stores, and whose last decode worker, are reached over wires that can be cut."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec

from benchmarks.breaking.wires import Wire, cut
from kvrelay.config import Config
from kvrelay.config_text import render
from kvrelay.deploy.key import write_secret
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.members import Kind, Member, RunDir, members
from kvrelay.deploy.ports import PortClaims, free_port
from kvrelay.types import Role, Transport

LOOPBACK = "127.0.0.1"


def over_tcp(config: Config) -> Config:
    """``config`` with two nodes that share no memory."""
    return msgspec.structs.replace(
        config,
        store=msgspec.structs.replace(config.store, transports=(Transport.TCP,)),
        cluster=msgspec.structs.replace(config.cluster, stores=2),
    )


class Wires:
    """All wires of one cluster, by the two parties that each joins."""

    def __init__(self) -> None:
        self.router_and_decode: list[Wire] = []
        """The router to the last decode worker's engine, and that worker to the router's control port."""
        self.stores: list[Wire] = []
        """Each store to the other."""
        self.cut_off = ""
        """Name of the decode worker."""

    def __repr__(self) -> str:
        return f"<Wires {[*self.router_and_decode, *self.stores]}>"

    @contextlib.contextmanager
    def between_router_and_decode(self) -> Iterator[None]:
        """Nothing passes between them inside the block."""
        with cut(self.router_and_decode):
            yield

    @contextlib.contextmanager
    def between_stores(self) -> Iterator[None]:
        """The same for the two stores."""
        with cut(self.stores):
            yield

    def members(self, config: Config, run: RunDir, model: Path, claims: PortClaims) -> list[Member]:
        """The cluster's processes, each told the addresses of wires instead of those of the others."""
        wanted = members(config, run, model, claims)
        router = next(member for member in wanted if member.kind is Kind.ROUTER)
        self.cut_off = next(member.name for member in reversed(wanted) if member.role is Role.DECODE)
        return [self._joined(member, config, run, router) for member in wanted]

    def _joined(self, member: Member, config: Config, run: RunDir, router: Member) -> Member:
        if member.kind is Kind.STORE:
            return self._store(member, config, run)
        return self._decode_worker(member, router) if member.name == self.cut_off else member

    def _store(self, member: Member, config: Config, run: RunDir) -> Member:
        port = free_port(LOOPBACK)
        wire = Wire(f"{LOOPBACK}:{port}")
        self.stores.append(wire)
        told = msgspec.structs.replace(config.store, peer_port=port, advertise=wire.address)
        file = run.scratch / f"{member.name}.toml"
        write_secret(file, render(msgspec.structs.replace(config, store=told)))
        return _with(member, "--config", str(file))

    def _decode_worker(self, member: Member, router: Member) -> Member:
        engine, control = Wire(member.url.removeprefix("http://")), Wire(router.control)
        self.router_and_decode += [engine, control]
        return _with(_with(member, "--advertise", engine.address), "--router", control.address)

    async def close(self) -> None:
        for wire in [*self.router_and_decode, *self.stores]:
            await wire.close()


def _with(member: Member, option: str, value: str) -> Member:
    """``member`` with another value for one option of its command."""
    words = list(member.arguments)
    words[words.index(option) + 1] = value
    return msgspec.structs.replace(member, arguments=tuple(words))


@contextlib.asynccontextmanager
async def wired(config: Config, model: Path) -> AsyncIterator[tuple[LocalCluster, Wires]]:
    """A running cluster of ``over_tcp(config)`` and its wires, which are whole."""
    wires = Wires()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(wires.close)
        with patch("kvrelay.deploy.local.members", wires.members):
            cluster = await stack.enter_async_context(LocalCluster(over_tcp(config), model=model))
        yield cluster, wires
