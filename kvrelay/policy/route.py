"""Choose workers for one request: least work wins, and the runner-ups are kept. It must never reserve anything.

P and D are chosen one after the other: no part of the cost depends on both yet, so that gives the best pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvrelay.policy.cost import Cost, DecodeLoad, PrefillLoad, decode_cost, prefill_cost
from kvrelay.types import Value


class Path(StrEnum):
    """How a prompt gets computed."""

    REMOTE_PREFILL = "remote_prefill"
    LOCAL = "local"


class Candidate(Value, frozen=True, kw_only=True):
    """A worker and what choosing it would cost."""

    worker: str
    cost: Cost


class Choice(Value, frozen=True, kw_only=True):
    """The cheapest candidate and the others, cheapest first."""

    worker: str
    cost: Cost
    runners_up: tuple[Candidate, ...]

    def explain(self, runners_up: int) -> dict[str, object]:
        """JSON-ready: what each part cost, for the chosen one and the next best ``runners_up``."""
        others = [{"worker": other.worker, "cost": dict(other.cost.parts)} for other in self.runners_up[:runners_up]]
        return {"worker": self.worker, "cost": dict(self.cost.parts), "runners_up": others}


def choose_prefill(loads: Iterable[PrefillLoad], prompt_tokens: int) -> Choice | None:
    """The P that finishes this prompt after the least work; None without candidates."""
    return _cheapest((prefill_cost(load, prompt_tokens), load.last_chosen, load.worker) for load in loads)


def choose_decode(loads: Iterable[DecodeLoad], sequences: int, kv_tokens: int) -> Choice | None:
    """The D that this request disturbs least; None without candidates."""
    return _cheapest((decode_cost(load, sequences, kv_tokens), load.last_chosen, load.worker) for load in loads)


def _cheapest(priced: Iterable[tuple[Cost, int, str]]) -> Choice | None:
    ranked = sorted(priced, key=lambda entry: (entry[0].total, entry[1], entry[2]))
    if not ranked:
        return None
    (cost, _, worker), *others = ranked
    runners_up = tuple(Candidate(worker=name, cost=price) for price, _, name in others)
    return Choice(worker=worker, cost=cost, runners_up=runners_up)
