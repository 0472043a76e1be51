"""A running cluster seen from outside, with what can be done to its members."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from benchmarks.breaking.stopped import stopped
from benchmarks.breaking.wired import Wires
from kvrelay.deploy.local import LocalCluster, WorkerView
from tests.serving.probe import BACK_S, Probe


class Breakable(Probe):
    """The cluster and its wires."""

    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession, wires: Wires) -> None:
        super().__init__(cluster, http)
        self.wires = wires

    def stopped(self, name: str, *, all_of_it: bool = True) -> contextlib.AbstractContextManager[None]:
        """``name`` stands still inside the block."""
        return stopped(self.cluster.pid(name), all_of_it=all_of_it)

    async def busiest(self) -> str:
        """The decode worker that writes most answers: one that failed before is given few until it has answered."""
        running = {worker.name: await self._requests(worker, "running") for worker in self.decoders}
        return max(running, key=running.__getitem__)

    async def until_writing(self, name: str) -> None:
        """Return once the decode worker ``name`` writes an answer."""
        (worker,) = [each for each in self.decoders if each.name == name]
        async with asyncio.timeout(BACK_S):
            while not await self._requests(worker, "running"):
                await asyncio.sleep(0.02)

    async def until_waiting(self, running: int) -> str:
        """Return the name of a decode worker once it writes ``running`` answers while another request waits there."""
        async with asyncio.timeout(BACK_S):
            while True:
                for worker in self.decoders:
                    waiting = await self._requests(worker, "waiting")
                    if waiting and await self._requests(worker, "running") >= running:
                        return worker.name
                await asyncio.sleep(0.02)

    async def _requests(self, worker: WorkerView, state: str) -> float:
        return (await self.metrics(worker.url))[f"vllm:num_requests_{state}"]

    async def resumed(self) -> tuple[float, float]:
        """How many answers went on elsewhere, and how many did not."""
        values = await self.metrics(self.cluster.url)
        went_on, failed = (
            values.get(f"kvrelay_resumes_total{{outcome={outcome}}}", 0.0) for outcome in ("resumed", "failed")
        )
        return went_on, failed
