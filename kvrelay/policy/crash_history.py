"""When a request is thought to kill its workers, so that no other one is to have it. It must never hold against a
request what happened after a worker wrote for it."""

from __future__ import annotations

from kvrelay.types import Value

ALONE_DEATHS = 2.0
"""Workers in a row that a request may lose while it is all that they have. One may die by chance; that a second one
dies within seconds of being asked is far less likely than that the request is the reason."""
MAX_DEATHS = 5
"""Workers in a row that it may lose so soon, whatever else they had. Where many are killed under load, a request that
still waits for its first word may well meet three of them."""
MAX_LOSSES = 8
"""Workers in a row that it may lose at all: a long answer that comes in one piece meets many deaths by chance."""
SOON_S = 10.0
"""A worker that had a request for longer did not die of being asked. Its first step comes within this, unless it has a
queue, and then others are there as well."""


class CrashHistory(Value, frozen=True, kw_only=True):
    """Deaths of workers that had a request, since one last wrote for it."""

    deaths: int = 0
    """Soon after they were asked."""
    share: float = 0.0
    """The same, each divided by all that its worker had: any of them may have been the reason."""
    late: int = 0
    """The others."""
    failed: tuple[tuple[str, str], ...] = ()
    """Of those that came soon: workers, with their incarnations, that answered that they failed. They may live."""

    def with_crash(self, share: float) -> CrashHistory:
        """One more died soon; ``share``: 1.0 when it had nothing else, 0.0 where nobody knows what it had."""
        return CrashHistory(deaths=self.deaths + 1, share=self.share + share, late=self.late, failed=self.failed)

    def with_failure(self, share: float, worker: str, incarnation: str) -> CrashHistory:
        """The same, and it said so."""
        failed = *self.failed, (worker, incarnation)
        return CrashHistory(deaths=self.deaths + 1, share=self.share + share, late=self.late, failed=failed)

    def with_late_loss(self) -> CrashHistory:
        """One more died, which had it for long."""
        return CrashHistory(deaths=self.deaths, share=self.share, late=self.late + 1, failed=self.failed)

    @property
    def is_poison(self) -> bool:
        """The next worker would most likely die as well."""
        return self.share >= ALONE_DEATHS or self.deaths >= MAX_DEATHS or self.deaths + self.late >= MAX_LOSSES
