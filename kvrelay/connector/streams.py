"""Queues of device work beside the engine's own, and the order between them. The forward thread only ever enqueues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.errors import Misconfigured


class Mark(Protocol):
    """A point in a queue of device work."""

    def wait(self) -> None:
        """Block this thread, without spinning, until everything before the mark is done."""
        ...


class Streams(Protocol):
    """One queue of ours beside the engine's compute queue."""

    def follow(self) -> None:
        """What is enqueued here from now on runs after what the engine has enqueued until now."""
        ...

    def enqueue(self, work: Callable[[], None]) -> Mark:
        """Have the device do what ``work`` asks of it, after what was enqueued here before; the mark stands behind."""
        ...

    def hold(self, mark: Mark) -> None:
        """What the engine enqueues from now on runs after ``mark``. No thread waits."""
        ...

    def pin(self, memory: torch.Tensor) -> None:
        """Page-lock host memory, so that the device copies to and from it by itself. Raises ``Misconfigured``."""
        ...

    def unpin(self, memory: torch.Tensor) -> None: ...


class CudaMark:
    """An event whose waiters sleep."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """A CUDA stream of low priority. The engine's queue is the current stream of the thread that calls."""

    def __init__(self, device: torch.device) -> None:
        lowest, _highest = torch.cuda.Stream.priority_range()
        self._side = torch.cuda.Stream(device, priority=lowest)

    def __repr__(self) -> str:
        return f"<CudaStreams {self._side}>"

    def follow(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))

    def enqueue(self, work: Callable[[], None]) -> CudaMark:
        with torch.cuda.stream(self._side):
            work()
        return CudaMark(self._side)

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark), mark
        torch.cuda.current_stream(self._side.device).wait_event(mark.event)

    def pin(self, memory: torch.Tensor) -> None:
        page_lock(memory)

    def unpin(self, memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def page_lock(memory: torch.Tensor) -> None:
    """Register ``memory`` with CUDA. Raises ``Misconfigured``."""
    # Not pin_memory=True: that rounds up to a power of two, and stops the device when it takes new memory.
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error.value:
        raise Misconfigured(
            f"cannot page-lock {memory.nbytes} bytes for copies from the GPU (CUDA error {error.value}); "
            "raise the limit on locked memory (ulimit -l)"
        )
