"""How long a request has waited for its decode worker. It must never count time in which the client is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

KEPT_GAPS = 5
ONE_STEP_S = 0.005
"""Pieces that come closer together are of one step, or were held up by a slow client: they show no pace."""


class StreamSilence:
    """How long the decode worker of one request has been silent, and how long it usually is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.since_s: float | None = None
        """When it began to wait for a token; None: it does not wait."""
        self._ended_s = clock()
        self._asked_again_s = 0.0
        self._gaps_s: deque[float] = deque(maxlen=KEPT_GAPS)

    def __repr__(self) -> str:
        state = ", none" if self.since_s is None else f" of {self._clock() - self.since_s:.3f} s"
        return f"<StreamSilence{state}>"

    @property
    def silent_since_s(self) -> float | None:
        """Since when the wait is the worker's fault; None while the request does not wait.

        While the client does not read, a worker cannot send either. Its TCP probes now and then whether it may send
        again, and waits longer after each refusal: seen with two processes of one machine.
        """
        return None if self.since_s is None else max(self.since_s, self._asked_again_s)

    @property
    def gap_s(self) -> float:
        """Recent median time between two pieces from the present worker; 0 before there were three. One long gap alone
        does not count: the engine may have computed a prompt meanwhile."""
        count = len(self._gaps_s)
        return sorted(self._gaps_s)[(count - 1) // 2] if count > 1 else 0.0

    def heard(self) -> None:
        """A piece came from the worker that wrote the one before: note the gap, and ``end`` the wait."""
        if self.silent_since_s is not None:
            gap_s = self._clock() - self.silent_since_s
            if gap_s > ONE_STEP_S:
                self._gaps_s.append(gap_s)
        self.end()

    def begin(self) -> None:
        self.since_s = self._clock()

    def again(self) -> None:
        """``begin``, once the client has read what came before."""
        now = self._clock()
        self._asked_again_s = max(self._asked_again_s, now + now - self._ended_s)
        self.since_s = now

    def leave(self) -> None:
        """``end``, and another worker writes the next piece: forget the pace of this one."""
        self._gaps_s.clear()
        self._asked_again_s = 0.0
        self.end()

    def end(self) -> None:
        self._ended_s = self._clock()
        self.since_s = None
