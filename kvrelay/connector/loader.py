"""Fills the engine's blocks with pages as they become ready, on its own thread. Each load is reported exactly once."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from kvrelay.connector.arenas import Absent, Find
from kvrelay.connector.heads import RankHeads
from kvrelay.connector.load import Load, LoadResult
from kvrelay.connector.mover import LoadTarget
from kvrelay.connector.plan import LoadJob

logger = logging.getLogger(__name__)

ATTACHING_POLL_S = 0.005
"""Pause between looks for an arena that is being attached."""


class Order(NamedTuple):
    """A load that has not begun: ``find`` gives the arena of its pages, whose epoch must be ``epoch``."""

    job: LoadJob
    find: Find
    epoch: int
    until_s: float = math.inf
    """When it is waited for no longer; counted from when the loader's thread had it first."""


class Loader:
    """Runs loads one after another. The forward thread starts, cancels and collects them, and never waits."""

    def __init__(
        self,
        layers: list[torch.Tensor],
        layout: LoadTarget,
        heads: RankHeads,
        *,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers = layers
        self._layout = layout
        self._heads = heads
        self._wait_s = wait_s
        self._clock = clock
        self._todo: SimpleQueue[Order | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[str, LoadJob] = {}
        self._dead = False
        self._cancelled: set[str] = set()
        self._done: list[LoadResult] = []
        self._thread = threading.Thread(target=self._run, name="kvrelay-loader", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Loader {len(self._pending)} pending, {len(self._done)} to report>"

    def start(self, job: LoadJob, find: Find, epoch: int) -> None:
        """Queue a load from the arena that ``find`` gives the loader's thread; its epoch must be ``epoch``."""
        with self._lock:
            self._pending[job.request_id] = job
            if self._dead:
                self._done.append(self._nothing(job, "load_crashed"))
            else:
                self._todo.put(Order(job, find, epoch))

    def cancel(self, request_id: str) -> None:
        """Stop a load soon. It is reported like any other; an unknown or reported one is left alone."""
        with self._lock:
            if request_id in self._pending:
                self._cancelled.add(request_id)

    def collect(self) -> list[LoadResult]:
        """The loads that ended since the last call, each exactly once."""
        with self._lock:
            done, self._done = self._done, []
            for result in done:
                self._pending.pop(result.request_id, None)
                self._cancelled.discard(result.request_id)
        return done

    def close(self) -> None:
        """End the thread after the load it is in."""
        with self._lock:
            self._cancelled.update(self._pending)
        self._todo.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._work()
        except Exception:  # an unreported load would hold its blocks and spin the engine until this ends it
            with self._lock:
                self._dead = True
                reported = {result.request_id for result in self._done}
                self._done += [
                    self._nothing(job, "load_crashed") for id, job in self._pending.items() if id not in reported
                ]
            raise

    def _work(self) -> None:
        orders: list[Order] = []
        active: list[Load] = []
        rest_s = 0.0
        while self._take(orders, rest_s if active or orders else None):
            orders = [order for order in orders if not self._begin(order, active)]
            began, moved = self._clock(), False
            for load in list(active):
                moved = self._advance(load) or moved
                if load.ended:
                    active.remove(load)
                    self._report(load.result())
            looked_s = self._clock() - began
            pauses = [ATTACHING_POLL_S] * bool(orders) + [load.pace.pause_s(looked_s) for load in active]
            rest_s = 0.0 if moved else min(pauses, default=0.0)

    def _take(self, orders: list[Order], rest_s: float | None) -> bool:
        """Add new orders; waits for one ``rest_s``, or (None) until it comes. False: end."""
        while True:
            try:
                order = self._todo.get(timeout=rest_s)
            except Empty:
                return True
            if order is None:
                return False
            orders.append(order._replace(until_s=self._clock() + self._wait_s))
            rest_s = 0.0

    def _begin(self, order: Order, active: list[Load]) -> bool:
        """Start a load, or report why not; False while its arena is being attached."""
        job = order.job
        try:
            arena = order.find()
            if job.request_id in self._cancelled:
                self._report(self._nothing(job, "load_cancelled"))
            elif arena is Absent.ATTACHING and self._clock() < order.until_s:
                return False
            elif isinstance(arena, Absent):
                self._report(self._nothing(job, "load_no_arena"))
            elif arena.epoch != order.epoch:
                self._report(self._nothing(job, "load_wrong_epoch"))
            else:
                active.append(Load(job, arena, self._layout, self._layers, self._heads, self._clock()))
        except Exception:  # border: as of a load in progress
            logger.exception("the load of %s cannot begin; the engine computes its prompt", job.request_id)
            self._report(self._nothing(job, "load_crashed"))
        return True

    def _advance(self, load: Load) -> bool:
        if load.job.request_id in self._cancelled:
            load.give_up_from(0, "load_cancelled")
            return True
        try:
            began = self._clock()
            moved = load.advance(began, self._wait_s)
            load.moving_s += self._clock() - began if moved else 0.0
            return moved
        except Exception:  # border: an unreported load would hold its blocks and spin the engine for ever
            logger.exception("load of %s failed; the engine computes its prompt", load.job.request_id)
            load.give_up_from(0, "load_crashed")
            return True

    def _nothing(self, job: LoadJob, reason: str) -> LoadResult:
        size = self._layout.block_tokens
        blocks = frozenset(job.blocks[job.begin // size : -(-job.end // size)])
        return LoadResult(job.request_id, blocks, (), {reason: 1})

    def _report(self, result: LoadResult) -> None:
        with self._lock:
            self._done.append(result)
