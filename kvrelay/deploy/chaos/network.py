"""Members in network namespaces of their own, as containers are: cut off without a word. It must never touch the
network that it runs in itself, but for its ends of their links."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil

from kvrelay.deploy.chaos.bursts import Bursts
from kvrelay.deploy.chaos.mending import Unmended, mend_each
from kvrelay.deploy.chaos.processes import ProcessVictims, members
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost, Misconfigured

DEEDS = (Deed.PARTITION, Deed.LOSS)


class NetworkVictims:
    """Their links are pairs of devices (veth): this side is taken down, and theirs loses what it sends."""

    def __init__(self, *, kills: bool) -> None:
        """``kills``: members may be killed while they are cut off, which leaves half-open sockets. Raises
        ``Misconfigured`` where nothing can be cut."""
        if why := why_not():
            raise Misconfigured(why)
        self._deeds = (*DEEDS, Deed.HALF_OPEN) if kills else DEEDS
        self._processes = ProcessVictims([Deed.KILL])
        self._cut: dict[str, list[str]] = {}
        """Devices of this side that are down, by member."""
        self._bursts: dict[str, Bursts] = {}

    def __repr__(self) -> str:
        return f"<NetworkVictims, {len(self._cut)} cut off>"

    async def targets(self) -> list[Target]:
        apart = sorted({(name, kind) for name, kind, process in members() if _is_apart(process)})
        if not apart:
            raise Lost(
                "no member runs in a network namespace of its own, and to cut the network of all would cut yours; "
                "start members in containers, or as: ip netns exec NAME kvrelay worker ..."
            )
        return [Target(name=name, kind=kind, deeds=self._deeds) for name, kind in apart]

    async def begin(self) -> None: ...

    async def hurt(self, name: str, deed: Deed) -> None:
        devices = await self._devices(name)
        self._cut[name] = [*self._cut.get(name, ()), *devices]
        if deed is Deed.LOSS:
            self._bursts[name] = Bursts(lambda cut: _set(devices, "down") if cut else _mend(devices))
            return
        await _set(devices, "down")
        if deed is Deed.HALF_OPEN:
            await self._processes.hurt(name, Deed.KILL)

    async def mend(self, name: str) -> None:
        if name in self._bursts:
            await self._bursts[name].end()
            self._bursts.pop(name, None)  # unless another mend of it was first
        await _mend(self._cut.get(name, ()))
        self._cut.pop(name, None)

    async def end(self) -> list[Unmended]:
        return await mend_each(self._cut, self.mend, self._by_hand)

    def _by_hand(self, name: str) -> str:
        return "; ".join(f"ip link set dev {device} up" for device in dict.fromkeys(self._cut.get(name, ())))

    async def _devices(self, name: str) -> list[str]:
        """This side's devices of the links of ``name``. Raises ``Lost``."""
        process = next((each for found, _, each in members() if found == name), None)
        if process is None:
            raise Lost(f"no process is called {name} at the moment")
        theirs = await _links("nsenter", "--target", str(process.pid), "--net")
        peers = {link.get("link_index") for link in theirs if link.get("link_netnsid") is not None}
        ours = [link["ifname"] for link in await _links() if link["ifindex"] in peers and "link_index" in link]
        if not ours:
            raise Lost(f"no link of {name} ends in this network namespace; run this where its other end is")
        return ours


def why_not() -> str:
    """Why nothing can be cut here; empty when it can."""
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"--network needs {' and '.join(missing)}; install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "--network takes links down, which only root may; run this as root, or without it"
    return ""


def _is_apart(process: psutil.Process) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except OSError:
        return False  # it ended meanwhile


async def _links(*inside: str) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = msgspec.json.decode(await _run(*inside, "ip", "-json", "link", "show"))
    return links


async def _mend(devices: Sequence[str]) -> None:
    """Set those devices up that still exist: others went with their namespace, and their successors are whole."""
    there = {link["ifname"] for link in await _links()} if devices else set()
    await _set([device for device in dict.fromkeys(devices) if device in there], "up")


async def _set(devices: Sequence[str], state: str) -> None:
    """Raises ``Lost`` after all of them were tried."""
    tries = (_run("ip", "link", "set", "dev", device, state) for device in devices)
    for answer in await asyncio.gather(*tries, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


async def _run(*words: str) -> bytes:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    said, problem = await process.communicate()
    if process.returncode:
        raise Lost(f"{' '.join(words)}: {problem.decode(errors='replace').strip()}")
    return said
