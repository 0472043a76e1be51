"""Members of a cluster that run as processes of this machine: found by their names, stopped and killed. It must never
touch another user's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence

import psutil

from kvrelay.deploy.chaos.mending import Unmended, mend_each
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost

_COMMANDS = ("worker", "store", "router")


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
        kinds = {name: kind for name, kind, _ in members()}
        return [Target(name=name, kind=kind, deeds=self._deeds) for name, kind in sorted(kinds.items())]

    async def begin(self) -> None: ...

    async def hurt(self, name: str, deed: Deed) -> None:
        tree = [process for found, _, process in members() if found == name]
        if not tree:
            raise Lost(f"no process is called {name} at the moment")
        tree += tree[0].children(recursive=True)
        if deed is Deed.STOP:
            self._stopped[name] = [*self._stopped.get(name, ()), *tree]
        _signal(tree, signal.SIGSTOP if deed is Deed.STOP else signal.SIGKILL)

    async def mend(self, name: str) -> None:
        _signal(self._stopped.get(name, ()), signal.SIGCONT)
        self._stopped.pop(name, None)

    async def end(self) -> list[Unmended]:
        return await mend_each(self._stopped, self.mend, self._by_hand)

    def _by_hand(self, name: str) -> str:
        return " ".join(("kill -CONT", *(str(process.pid) for process in self._stopped[name])))


def members() -> Iterable[tuple[str, str, psutil.Process]]:
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
    """Raises ``Lost`` after all of them were tried."""
    refused = []
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            pass  # it ended meanwhile
        except psutil.Error as error:
            refused.append(str(error))
    if refused:
        raise Lost(f"{number.name} was refused: {', '.join(refused)}")
