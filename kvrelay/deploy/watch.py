"""Finds routers that run and do not answer, and ends them so that they are started again: of those that share a port, a
stopped one would go on being given its part of the connections. It must never end one unless another one answers."""

from __future__ import annotations

import asyncio
import logging

from kvrelay.deploy.crew import Crew
from kvrelay.deploy.members import Member
from kvrelay.deploy.readiness import answers

_log = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
MOST_MISSED = 3
"""Questions in a row without an answer, each for as long as a handshake may take."""


class RouterWatch:
    """Asks each router of ``crew`` over its own control port."""

    def __init__(self, crew: Crew, key: bytes) -> None:
        self._crew = crew
        self._key = key
        self._missed: dict[int, int] = {}
        """By process."""

    def __repr__(self) -> str:
        return f"<RouterWatch, {len(self._missed)} routers miss questions>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            await self.ask(self._crew.serving_routers())

    async def ask(self, routers: list[Member]) -> None:
        """One round."""
        if len(routers) < 2:
            self._missed.clear()
            return
        pids = {router.name: self._crew.pid(router.name) for router in routers}
        heard = await asyncio.gather(*(answers(router.control, self._key) for router in routers))
        said = {pids[router.name]: answered for router, answered in zip(routers, heard, strict=True)}
        self._missed = {pid: self._missed.get(pid, 0) + 1 for pid, answered in said.items() if not answered}
        for router in routers:
            missed = self._missed.get(pids[router.name], 0)
            if any(heard) and missed >= MOST_MISSED and self._crew.pid(router.name) == pids[router.name]:
                _log.warning("%s answers nothing any more: it is ended and started again", router.name)
                await self._crew.end(router.name)
