"""A device whose queues run when they like, within the order that marks impose. Its memory is the host's.

What is enqueued does not happen until its queue comes to it, as on a GPU; a missing order between two queues therefore
shows, with the schedule that is the worst for it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum

import torch

from kvrelay.connector.streams import Mark


class Schedule(StrEnum):
    """When queues run."""

    AT_ONCE = "at once"
    LATE = "late"
    """The engine's queue runs at once; the others only when the engine's waits for them, and after ``go``."""
    EARLY = "early"
    """The other way round."""
    SHUFFLED = "shuffled"

    def is_eager(self, queue: str) -> bool:
        """Whether what is enqueued in ``queue`` runs at once."""
        compute = queue == COMPUTE
        return {Schedule.AT_ONCE: True, Schedule.LATE: compute, Schedule.EARLY: not compute}.get(self, False)


COMPUTE = "compute"
"""The engine's queue."""


class SimMark:
    """A point in a queue; ``wait`` runs what stands before it."""

    def __init__(self, device: SimDevice, queue: str) -> None:
        self._device = device
        self.queue = queue
        self.passed = False

    def wait(self) -> None:
        self._device.may_wait.wait(10)
        self._device.run_to(self)


Op = Callable[[], None] | SimMark | tuple[str, SimMark]
"""Work, a mark to pass, or a mark of another queue to wait for."""


class SimDevice:
    """Queues by name, each in order."""

    def __init__(self, schedule: Schedule, seed: int = 0) -> None:
        self._schedule = schedule
        self._rng = random.Random(seed)
        self._queues: dict[str, deque[Op]] = {COMPUTE: deque()}
        self._lock = threading.RLock()
        self.may_wait = threading.Event()
        """Threads that wait for a mark go on from then on."""
        if schedule is not Schedule.LATE:
            self.go()

    def go(self) -> None:
        """Let waiting threads have what they wait for."""
        self.may_wait.set()

    def add(self, queue: str) -> None:
        self._queues[queue] = deque()

    def push(self, queue: str, *ops: Op) -> None:
        with self._lock:
            self._queues[queue].extend(ops)
            if self._schedule.is_eager(queue):
                while self._queues[queue]:
                    self._force(queue)
            elif self._schedule is Schedule.SHUFFLED:
                for name in self._rng.choices(list(self._queues), k=self._rng.randrange(6)):
                    self._try(name)

    def _try(self, queue: str) -> None:
        """Run the next operation of ``queue``, unless it has to wait."""
        head = self._queues[queue][0] if self._queues[queue] else None
        if head is not None and not (isinstance(head, tuple) and not head[1].passed):
            self._force(queue)

    def _force(self, queue: str) -> None:
        """Run the next operation of ``queue``, and what it waits for."""
        op = self._queues[queue].popleft()
        if isinstance(op, SimMark):
            op.passed = True
        elif isinstance(op, tuple):
            self.run_to(op[1])
        else:
            op()

    def run_to(self, mark: SimMark) -> None:
        """Run what must have run before ``mark`` is passed, and nothing else."""
        with self._lock:
            while not mark.passed:
                self._force(mark.queue)

    def synchronize(self) -> None:
        """Run everything."""
        self.go()
        with self._lock:
            for name, queue in self._queues.items():
                while queue:
                    self._force(name)


class SimStreams:
    """``Streams`` over a ``SimDevice``."""

    def __init__(self, device: SimDevice, queue: str) -> None:
        self._device = device
        self._queue = queue
        self.pinned: list[int] = []
        device.add(queue)

    def follow(self) -> None:
        mark = SimMark(self._device, COMPUTE)
        self._device.push(COMPUTE, mark)
        self._device.push(self._queue, ("wait", mark))

    def enqueue(self, work: Callable[[], None]) -> SimMark:
        mark = SimMark(self._device, self._queue)
        self._device.push(self._queue, work, mark)
        return mark

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, SimMark)
        self._device.push(COMPUTE, ("wait", mark))

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())
