"""Who could write answers of one model, now or soon. A frozen value, made once for all that wait: to look at every
member for each of them takes too long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.fleet.ground import Ground
from kvrelay.fleet.member import Member
from kvrelay.types import WorkerInfo


@dataclass(frozen=True)
class Chances:
    """Workers, by name."""

    ready: frozenset[str]
    """They get work."""
    soon: frozenset[str]
    """They were heard lately, and neither left nor are to become empty: after a pause of this router or of its network
    nobody was heard, and everybody lives."""
    cut: frozenset[str]
    """Those of them whose link ended: they may be starting again."""

    @classmethod
    def of(
        cls, model: str, ground: Ground, members: Iterable[Member[WorkerInfo]], lease_s: float, now: float
    ) -> Chances:
        """``ground`` is that of ``model``; ``lease_s`` is lately."""
        soon = [
            member
            for member in members
            if member.info.role.decodes
            and member.info.model == model
            and not (member.left or member.draining)
            and now - member.heard_s <= lease_s
        ]
        return cls(
            ready=frozenset(worker.name for worker in ground.writers),
            soon=frozenset(member.info.name for member in soon),
            cut=frozenset(member.info.name for member in soon if member.cut),
        )

    def only_soon(self, tried: set[str]) -> bool:
        """Whether nobody can write now what those who were ``tried`` have failed, and somebody may be able to soon."""
        return self.ready <= tried and bool(self.soon - (tried - self.cut))
