"""Who could write answers of one model, now or soon. A frozen value, made once for all that wait: to look at every
member for each of them takes too long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvrelay.fleet.lost_answer import LostAnswer
from kvrelay.fleet.member import Member
from kvrelay.fleet.topology import Topology
from kvrelay.policy.recover import Manner
from kvrelay.types import Engine, WorkerInfo


@dataclass(frozen=True)
class DecodeAvailability:
    """Workers, by name."""

    engines: Mapping[str, Engine]
    """Of all of them."""
    ready: frozenset[str]
    """They get work."""
    soon: frozenset[str]
    """They were heard lately, and neither left nor are to become empty: after a pause of this router or of its network
    nobody was heard, and everybody lives."""
    cut: frozenset[str]
    """Those of them whose link ended: they may be starting again."""

    @classmethod
    def of(
        cls, model: str, topology: Topology, members: Iterable[Member[WorkerInfo]], lease_s: float, now: float
    ) -> DecodeAvailability:
        """``topology`` is that of ``model``; ``lease_s`` is lately."""
        soon = [
            member
            for member in members
            if member.info.role.decodes
            and member.info.model == model
            and not (member.left or member.draining)
            and now - member.heard_s <= lease_s
        ]
        return cls(
            engines={
                worker.name: worker.engine for worker in (*topology.decode_workers, *(member.info for member in soon))
            },
            ready=frozenset(worker.name for worker in topology.decode_workers),
            soon=frozenset(member.info.name for member in soon),
            cut=frozenset(member.info.name for member in soon if member.cut),
        )

    def only_soon(self, lost: LostAnswer, tried: set[str]) -> bool:
        """Whether nobody can write ``lost`` now, which those who were ``tried`` have failed, and somebody may be able
        to soon."""
        able = self._able(lost.ask.context_tokens, replays=lost.rest.manner is Manner.REPLAY)
        return self.ready & able <= tried and bool((self.soon & able) - (tried - self.cut))

    def _able(self, context_tokens: int, *, replays: bool) -> frozenset[str]:
        """Those that take so long a prompt with its answer and, if need be, can replay."""
        if context_tokens <= self._least_context_tokens and not replays:  # nearly always
            return self._all
        return frozenset(
            name
            for name, engine in self.engines.items()
            if context_tokens <= engine.max_model_len and (engine.replays or not replays)
        )

    @cached_property
    def _all(self) -> frozenset[str]:
        return frozenset(self.engines)

    @cached_property
    def _least_context_tokens(self) -> int:
        return min((engine.max_model_len for engine in self.engines.values()), default=0)
