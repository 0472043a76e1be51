"""How long one step of the engine may wait for answers of the store: one budget, whoever asks.

It must never let the running answers pay for each waiting request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from kvrelay.protocol.client import Acquired

GRACE_S = 0.005
"""An answer takes about 0.3 ms; without the wait, a request that arrives while another computes would lose a whole
step (up to seconds on a CPU)."""


class Grace:
    """What is left of the step's wait. A store that let one run out gets no more until it has answered something."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = GRACE_S
        self._is_silent = False

    def __repr__(self) -> str:
        return f"<Grace {self._left_s * 1000:.1f} ms left{', the store is silent' if self._is_silent else ''}>"

    def renew(self) -> None:
        """A step is over."""
        self._left_s = 0.0 if self._is_silent else GRACE_S

    def wait(self, answer: Future[Acquired], most_s: float) -> Acquired | None:
        """The answer; None when it does not come within ``most_s`` and what is left. Raises ``KvrelayError``."""
        wait_s, began = min(most_s, self._left_s), self._clock()
        if answer.done():
            self._is_silent = False
        elif wait_s <= 0:
            return None
        try:
            return answer.result(timeout=wait_s)
        except FutureTimeout:
            self._is_silent = wait_s >= most_s  # what others have left of the step is too short to tell
            return None
        finally:
            self._left_s = max(0.0, self._left_s - (self._clock() - began))
