"""Whatever can be broken, and is mended again. It must never leave anything broken behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec
import psutil

from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.deploy.mock.faults import Faults
from kvrelay.errors import Lost

_COMMANDS = ("worker", "store", "router")


class Victims(Protocol):
    """Some processes, by name."""

    async def targets(self) -> list[Target]:
        """What there is. Raises ``Lost``."""

    async def hurt(self, name: str, deed: Deed) -> None:
        """Raises ``Lost`` when it is not there."""

    async def mend(self, name: str) -> None:
        """Undo that. Raises ``Lost``."""


class MockVictims:
    """Mock workers and stores, by the route of ``kvrelay fault``."""

    def __init__(self, http: aiohttp.ClientSession, url: str, engine_key: str) -> None:
        self._http = http
        self._url = f"{url}/workers"
        self._headers = {"authorization": f"Bearer {engine_key}"}

    def __repr__(self) -> str:
        return f"<MockVictims at {self._url}>"

    async def targets(self) -> list[Target]:
        shown = await self._ask("GET", "")
        return [
            Target(
                name=each["name"],
                kind=each["role"],
                deeds=(Deed.KILL,) if each["role"] == "store" else (Deed.KILL, Deed.STOP),
            )
            for each in shown
        ]

    async def hurt(self, name: str, deed: Deed) -> None:
        await self._give(name, Faults(dead=deed is Deed.KILL, hang=deed is Deed.STOP))

    async def mend(self, name: str) -> None:
        await self._give(name, Faults())

    async def _give(self, name: str, faults: Faults) -> None:
        await self._ask("PUT", f"/{name}/faults", msgspec.json.encode(faults))

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        try:
            async with self._http.request(method, self._url + path, data=body, headers=self._headers) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise Lost(f"no mock workers answer at {self._url}: {error}") from error
        if response.status != 200:
            raise Lost(f"the mock workers answer {response.status}: {answer.decode(errors='replace')[:200]}")
        return msgspec.json.decode(answer)


class ProcessVictims:
    """``kvrelay worker``, ``store`` and ``router`` processes of this user on this machine. A supervisor has to start
    those again that are killed."""

    def __init__(self, deeds: Sequence[Deed]) -> None:
        """``deeds``: KILL only where something starts processes again."""
        self._deeds = tuple(deeds)
        self._stopped: dict[str, list[psutil.Process]] = {}

    def __repr__(self) -> str:
        return f"<ProcessVictims, {len(self._stopped)} stopped>"

    async def targets(self) -> list[Target]:
        kinds = {name: kind for name, kind, _ in _processes()}
        return [Target(name=name, kind=kind, deeds=self._deeds) for name, kind in sorted(kinds.items())]

    async def hurt(self, name: str, deed: Deed) -> None:
        tree = [process for found, _, process in _processes() if found == name]
        if not tree:
            raise Lost(f"no process is called {name} at the moment")
        tree += tree[0].children(recursive=True)
        if deed is Deed.STOP:
            self._stopped[name] = tree
        _signal(tree, signal.SIGSTOP if deed is Deed.STOP else signal.SIGKILL)

    async def mend(self, name: str) -> None:
        _signal(self._stopped.pop(name, []), signal.SIGCONT)


def _processes() -> Iterable[tuple[str, str, psutil.Process]]:
    """Name, kind and process of each member that runs here."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or []
        at = next((at for at, word in enumerate(words) if word == "kvrelay" or word.endswith("/kvrelay")), None)
        if at is None or process.info["uids"].real != os.getuid() or words[at + 1 : at + 2] == []:
            continue
        command = words[at + 1]
        if command in _COMMANDS:
            name = _option(words, "--name") or f"{command}-{process.pid}"
            yield name, _option(words, "--role") or command, process


def _option(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1] if flag in words[:-1] else ""


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            process.send_signal(number)
