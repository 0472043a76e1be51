"""Which decode workers of one model can take a lost answer now, and which may be able to soon. A frozen value that is
made once for all waiting answers: listing the members for each answer takes too long."""

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
    """The decode workers of one model that may take an answer, by name."""

    engines: Mapping[str, Engine]
    """Engine of each worker that is in ``ready`` or ``soon``."""
    ready: frozenset[str]
    """Workers that get requests now."""
    soon: frozenset[str]
    """Workers that sent a heartbeat within the lease and neither left nor drain. A worker may be here and not in
    ``ready``: after a pause of this router or of its network no worker was heard for a while, and all of them live."""
    cut: frozenset[str]
    """Workers of ``soon`` whose link ended: they may be starting again."""

    @classmethod
    def of(
        cls, model: str, topology: Topology, members: Iterable[Member[WorkerInfo]], lease_s: float, now: float
    ) -> DecodeAvailability:
        """``topology`` is that of ``model``. ``lease_s``: longest time since the last heartbeat of a worker in
        ``soon``."""
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
        """Whether no worker can take ``lost`` now, but one may be able to soon. The workers in ``tried`` have failed
        it: one of them counts again only when its link ended, since it may be starting again."""
        able = self._able(lost.ask.context_tokens, replays=lost.rest.manner is Manner.REPLAY)
        return self.ready & able <= tried and bool((self.soon & able) - (tried - self.cut))

    def _able(self, context_tokens: int, *, replays: bool) -> frozenset[str]:
        """Workers whose context takes ``context_tokens`` and that can replay, where that is needed."""
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
