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
    """What is left of the step's wait.

    A store that let one run out gets no more until it has answered something, unless the engine is idle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = GRACE_S
        self._is_silent = False
        self.is_idle = False
        """Whether the last step computed nothing."""

    def __repr__(self) -> str:
        return f"<Grace {self._left_s * 1000:.1f} ms left{', the store is silent' if self._is_silent else ''}>"

    def renew(self, *, is_idle: bool) -> None:
        """A step is over. ``is_idle``: it computed nothing.

        Then a wait keeps nobody's answer back, and a silent store gets it as well: the engine looks again after a
        millisecond, and on a machine without a free core the thread that keeps the link would not come to the
        interpreter in between, for as long as the engine looks.
        """
        self.is_idle = is_idle
        self._left_s = GRACE_S if is_idle or not self._is_silent else 0.0

    def wait(self, answer: Future[Acquired], most_s: float) -> Acquired | None:
        """The answer; None when it does not come within ``most_s`` and what is left. Raises ``KvrelayError``."""
        wait_s, began = min(most_s, self._left_s), self._clock()
        if wait_s <= 0 and not answer.done():
            return None
        try:
            found = answer.result(timeout=wait_s)
        except FutureTimeout:
            self._is_silent = wait_s >= most_s  # what others have left of the step is too short to tell
            return None
        else:
            self._is_silent = False
            return found
        finally:
            self._left_s = max(0.0, self._left_s - (self._clock() - began))
