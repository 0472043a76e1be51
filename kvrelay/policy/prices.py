"""Costs of all places of one request, and the cheapest of them: of most it is enough to know that they cost more. It
must never name another place than pricing all of them in detail would."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat, takewhile

from kvrelay.policy.bounds import least_prefill_s
from kvrelay.policy.cost import (
    DecodeColumns,
    PrefillColumns,
    PrefillCost,
    Prompt,
    Ways,
    between_chunks_s,
    harmed,
    prefill_cost,
    prefill_price,
    transfers_s,
)
from kvrelay.policy.decode_costs import DecodeCosts

EQUAL_SHARE = 0.01
"""Costs that differ by less than this share are equal: no prediction is that good, and equals take turns, which
spreads what they cache."""
RUNNERS_UP = 3

Place = tuple[int, int]
"""Positions of the prefill and the decode worker; ``LOCAL`` for a decode worker that computes the prompt itself."""
LOCAL = -1
_Priced = tuple[float, int, int]
"""Total and place."""


class Prices:
    """Prices of all places where one request could be served."""

    def __init__(self, prompt: Prompt, prefills: PrefillColumns, decodes: DecodeColumns, ways: Ways) -> None:
        self.prompt = prompt
        self.prefills = prefills
        self.decodes = decodes
        self.ways = ways
        self._prefill_costs: dict[int, tuple[float, PrefillCost]] = {}
        self._own_costs: dict[int, PrefillCost] = {}
        self._remotes: dict[Place, tuple[float, float]] = {}
        """Total, and the hand-off's part beyond the prefill, of each pair that was priced."""
        self.decode_costs = DecodeCosts(prompt, decodes)
        self._decode_s = self.decode_costs.seconds
        self._least_prefill_s = self._leasts_prefill_s()
        self._least_local_s = self._leasts_local_s() if decodes.computes else []
        self._prefills = sorted(ways.prefills, key=self._least_prefill_s.__getitem__)
        self._decodes = sorted(ways.decodes, key=self._decode_s.__getitem__)
        self._computing = sorted(decodes.computes, key=self._least_local_s.__getitem__)
        """Each in order, those first that may be cheapest."""
        self._local = self._cheapest_locals()
        self._remote = self._cheapest_pairs()

    def __repr__(self) -> str:
        return f"<Prices of {len(self.ways.prefills)} x {len(self.ways.decodes)} pairs>"

    # ------------------------------------------------------------ of one place

    def _priced_prefill(self, at: int) -> tuple[float, PrefillCost]:
        """What the prompt costs on this prefill worker, and the parts of that."""
        known = self._prefill_costs.get(at)
        if known is None:
            price = prefill_price(self.prefills, at)
            cost = prefill_cost(self.prompt, self.prefills, at, price)
            priced_s = self.prefills.queue_s[at] + cost.source_s + price * cost.prefill_s
            known = self._prefill_costs[at] = priced_s, cost
        return known

    def prefill_cost(self, at: int) -> PrefillCost:
        """How this prefill worker would compute the prompt."""
        return self._priced_prefill(at)[1]

    def own_prefill_cost(self, at: int) -> PrefillCost:
        """How this decode worker would compute the prompt itself."""
        known = self._own_costs.get(at)
        if known is None:
            price = 1.0 + harmed(self.decodes, at)
            known = self._own_costs[at] = prefill_cost(self.prompt, self.decodes.as_prefills, at, price)
        return known

    def own_wait_s(self, at: int, own: PrefillCost) -> float:
        """How long a prompt waits that the decode worker computes itself."""
        return self.decodes.as_prefills.queue_s[at] + between_chunks_s(self.prompt, self.decodes, at, own)

    def moved_s(self, prefill: int, decode: int) -> float:
        """How long the hand-off takes beyond the prefill."""
        return self._priced_pair(prefill, decode)[1]

    def behind_s(self, prefill: int, decode: int, cost: PrefillCost, moved_s: float) -> float:
        """How long a prompt that P has computed waits for the prompts that D computes itself."""
        queue_s = self.decodes.as_prefills.queue_s[decode]
        if not queue_s:
            return 0.0
        return max(0.0, queue_s - self.prefills.queue_s[prefill] - cost.source_s - cost.prefill_s - moved_s)

    def _remote_s(self, prefill: int, decode: int) -> float:
        return self._priced_pair(prefill, decode)[0]

    def _priced_pair(self, prefill: int, decode: int) -> tuple[float, float]:
        known = self._remotes.get((prefill, decode))
        return self._remotes_s(prefill, [decode])[0] if known is None else known

    def _remotes_s(self, prefill: int, decodes: Sequence[int]) -> list[tuple[float, float]]:
        priced_s, cost = self._priced_prefill(prefill)
        moves_s = transfers_s(self.prompt, self.prefills, cost.prefill_s, self.ways, prefill, decodes)
        found = [
            (priced_s + moved_s + self._decode_s[at] + self.behind_s(prefill, at, cost, moved_s), moved_s)
            for at, moved_s in zip(decodes, moves_s, strict=True)
        ]
        self._remotes.update(zip(zip(repeat(prefill), decodes), found, strict=False))
        return found

    def _local_s(self, at: int) -> float:
        own = self.own_prefill_cost(at)
        total_s = own.source_s + (1.0 + harmed(self.decodes, at)) * own.prefill_s + self._decode_s[at]
        return total_s + self.own_wait_s(at, own)

    # ------------------------------------------------------------ what they cost at least

    def _leasts_prefill_s(self) -> list[float]:
        """Least cost of each prefill worker, with the least that its way to a decode worker takes."""
        prefills, ways = self.prefills, self.ways
        price = [prefill_price(prefills, at) for at in range(len(prefills.names))]
        parts = zip(prefills.queue_s, least_prefill_s(self.prompt, prefills, price), ways.least_s, strict=True)
        return [queue_s + least_s + way_s for queue_s, least_s, way_s in parts]

    def _leasts_local_s(self) -> list[float]:
        """Least cost of each decode worker, if it computes the prompt itself."""
        decodes = self.decodes
        price = [1.0 + harmed(decodes, at) for at in range(len(decodes.answer_s))]
        least_s = least_prefill_s(self.prompt, decodes.as_prefills, price)
        parts = zip(decodes.as_prefills.queue_s, self._decode_s, least_s, strict=True)
        return [wait_s + decode_s + priced_s for wait_s, decode_s, priced_s in parts]

    # ------------------------------------------------------------ the cheapest

    def _cheapest_locals(self) -> list[_Priced]:
        """The cheapest decode workers that compute the prompt themselves."""
        found: list[_Priced] = []
        worst_s = float("inf")
        for at in self._computing:
            if self._least_local_s[at] >= worst_s:
                break
            worst_s = _keep(found, (self._local_s(at), LOCAL, at), [])
        return found

    def _cheapest_pairs(self) -> list[_Priced]:
        """The cheapest one, and those that are among the cheapest places of all.

        Most pairs cost too much even without the way between them, and are not priced.
        """
        found: list[_Priced] = []
        worst_s, decodes = float("inf"), self._decodes
        for prefill in self._prefills if decodes else ():
            if self._least_prefill_s[prefill] + self._decode_s[decodes[0]] >= worst_s:
                break
            few = self._few(prefill, worst_s)
            for (total_s, _), decode in zip(self._remotes_s(prefill, few), few, strict=True):
                if total_s < worst_s:
                    worst_s = _keep(found, (total_s, prefill, decode), self._local)
        return found

    def _few(self, prefill: int, worst_s: float) -> list[int]:
        """Decode workers that might cost less than ``worst_s`` with this prefill worker."""
        limit_s, allowed = (
            worst_s - self._priced_prefill(prefill)[0] - self.ways.least_s[prefill],
            self.ways.allowed[prefill],
        )
        first_over = bisect_left(self._decodes, limit_s, key=self._decode_s.__getitem__)
        return [at for at in self._decodes[:first_over] if allowed[at]]

    def cheapest(self) -> Place | None:
        """Equals take turns: first prefill workers for the best decode worker, then decode workers for that one."""
        if self._local and (not self._remote or self._local[0][0] < self._remote[0][0]):
            return LOCAL, self._turn_of_locals()
        if not self._remote:
            return None
        _, prefill, decode = self._remote[0]
        prefill = self._turn_of_prefills(prefill, decode)
        return prefill, self._turn_of_decodes(prefill)

    def _turn_of_locals(self) -> int:
        limit_s, least_s = (1.0 + EQUAL_SHARE) * self._local[0][0], self._least_local_s
        equals = takewhile(lambda at: least_s[at] <= limit_s, self._computing)
        return _first_in_turn(equals, self.decodes.as_prefills, limit_s, self._local_s)

    def _turn_of_prefills(self, best: int, decode: int) -> int:
        limit_s = self._remote_s(best, decode) + EQUAL_SHARE * self._priced_prefill(best)[0]
        rest_s, allowed = self._decode_s[decode], self.ways.allowed
        equals = takewhile(lambda at: self._least_prefill_s[at] + rest_s <= limit_s, self._prefills)
        understood = (at for at in equals if allowed[at][decode])
        return _first_in_turn(understood, self.prefills, limit_s, lambda at: self._remote_s(at, decode))

    def _turn_of_decodes(self, prefill: int) -> int:
        """The best one for another prefill worker of the same cost may not be the best for ``prefill``."""
        priced_s, allowed, best_s = self._priced_prefill(prefill)[0], self.ways.allowed[prefill], float("inf")
        rest_s, decodes = priced_s + self.ways.least_s[prefill], [at for at in self._decodes if allowed[at]]
        for at in decodes:
            if rest_s + self._decode_s[at] >= best_s:
                break
            best_s = min(best_s, self._remote_s(prefill, at))
        limit_s = best_s + EQUAL_SHARE * (best_s - priced_s)
        equals = takewhile(lambda at: rest_s + self._decode_s[at] <= limit_s, decodes)
        return _first_in_turn(equals, self.decodes.as_prefills, limit_s, lambda at: self._remote_s(prefill, at))

    def ranked(self) -> Iterator[Place]:
        """The cheapest places of all, and the cheapest of each path, by cost."""
        few = sorted([*self._local, *self._remote])[: RUNNERS_UP + 1]
        for _, prefill, decode in sorted({*few, *self._local[:1], *self._remote[:1]}):
            yield prefill, decode


def _keep(found: list[_Priced], place: _Priced, others: Sequence[_Priced]) -> float:
    """One more of the cheapest, of which few are kept.

    Returns the cost from which on a place is neither the cheapest of them nor among the few cheapest of them and
    ``others``.
    """
    insort(found, place)
    del found[RUNNERS_UP + 1 :]
    if len(found) + len(others) <= RUNNERS_UP:
        return float("inf")
    all_s = sorted([total_s for total_s, _, _ in (*found, *others)])
    return max(found[0][0], all_s[RUNNERS_UP])


def _first_in_turn(
    equals: Iterable[int], workers: PrefillColumns, limit_s: float, cost_s: Callable[[int], float]
) -> int:
    """The worker among ``equals`` that was chosen longest ago, of those that cost ``limit_s`` at most.

    Ordered first, and priced in that order: of many equals one is priced.
    """
    in_turn = sorted((workers.last_chosen[at], workers.names[at], at) for at in equals)
    return next(at for *_, at in in_turn if cost_s(at) <= limit_s)
