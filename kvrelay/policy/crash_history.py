"""Decides when a request is a poison request: one that crashes its workers, so that no other worker is asked. It must
never count a crash that came after the worker had answered the request."""

from __future__ import annotations

from kvrelay.types import Value

ALONE_DEATHS = 2.0
"""Workers in a row that a request may crash while they run nothing else. One worker may crash by chance; a second
crash within seconds of being asked is far more likely the request's fault."""
MAX_DEATHS = 5
"""Workers in a row that a request may lose soon after it was sent, whatever else they run. Where many workers are
killed under load, a request that waits for its first token may meet three of them by chance."""
MAX_LOSSES = 8
"""Workers in a row that a request may lose, soon or late: a long answer that is not streamed meets many crashes by
chance."""
SOON_S = 10.0
"""A worker that ran a request for longer than this was not crashed by its arrival. The first step on a request begins
within this time, unless the worker has a queue, and then it runs other requests as well."""


class CrashHistory(Value, frozen=True, kw_only=True):
    """Workers that one request has lost in a row, since a worker last wrote a token for it."""

    deaths: int = 0
    """Crashes within ``SOON_S`` of sending the request."""
    share: float = 0.0
    """Sum over ``deaths`` of the request's part of what the worker was running: any of those may have crashed it."""
    late: int = 0
    """Losses later than ``SOON_S`` after sending the request."""
    failed: tuple[tuple[str, str], ...] = ()
    """Workers among ``deaths`` that answered with a failure, each with its incarnation. They may still be alive."""

    def with_crash(self, share: float) -> CrashHistory:
        """The history with one more crash. ``share``: the request's part of what the worker was running; 1.0 when it
        ran nothing else, 0.0 when that is unknown."""
        return CrashHistory(deaths=self.deaths + 1, share=self.share + share, late=self.late, failed=self.failed)

    def with_failure(self, share: float, worker: str, incarnation: str) -> CrashHistory:
        """The history with one more crash, of a worker that answered with a failure."""
        failed = *self.failed, (worker, incarnation)
        return CrashHistory(deaths=self.deaths + 1, share=self.share + share, late=self.late, failed=failed)

    def with_late_loss(self) -> CrashHistory:
        """The history with one more loss, of a worker that had run the request for longer than ``SOON_S``."""
        return CrashHistory(deaths=self.deaths, share=self.share, late=self.late + 1, failed=self.failed)

    @property
    def is_poison(self) -> bool:
        """Whether the request would most likely crash the next worker as well."""
        return self.share >= ALONE_DEATHS or self.deaths >= MAX_DEATHS or self.deaths + self.late >= MAX_LOSSES

    @property
    def only_failed(self) -> bool:
        """Whether each worker that was lost answered with a failure, soon after it was asked."""
        return bool(self.failed) and len(self.failed) == self.deaths + self.late
