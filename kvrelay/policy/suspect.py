"""When a request is thought to kill its workers, so that no other one is to have it. It must never hold against a
request what happened after a worker wrote for it."""

from __future__ import annotations

from kvrelay.types import Value

ALONE_DEATHS = 2.0
"""Workers in a row that a request may lose while it is all that they have. One may die by chance; that a second one
dies at that very moment is far less likely than that the request is the reason."""
MAX_DEATHS = 5
"""Workers in a row that it may lose whatever else they had. Where many are killed under load, a request that still
waits for its first word may well meet three of them."""
DEADLY = frozenset({"reset", "failed", "silent"})
"""Ways to lose a worker that may be the request's doing: it hung up, or failed inside, or stands still. One that was
never reached, said goodbye or has no room is not among them."""


class Blame(Value, frozen=True, kw_only=True):
    """Deaths of workers that had a request, since one last wrote for it."""

    deaths: int = 0
    share: float = 0.0
    """The same, each divided by all that its worker had: any of them may have been the reason."""

    def another(self, share: float) -> Blame:
        """One more died; ``share``: 1.0 when it had nothing else."""
        return Blame(deaths=self.deaths + 1, share=self.share + share)

    @property
    def is_enough(self) -> bool:
        """The next worker would most likely die as well."""
        return self.share >= ALONE_DEATHS or self.deaths >= MAX_DEATHS
