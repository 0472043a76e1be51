"""Which prompts of a simulated engine stand back for much shorter ones in its next step: ``connector.short_first``
without vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.policy.patience import MAX_HELD_STEPS, stands_back


class Order:
    """Counts for how many steps they have done so."""

    def __init__(self) -> None:
        self._held_steps = 0

    def __repr__(self) -> str:
        return f"<Order, prompts stood back for {self._held_steps} steps>"

    def stand_back(self, running: Collection[Sequence], waiting: Collection[Sequence]) -> frozenset[Sequence]:
        """Sequences of ``running`` that have no part in the next step."""
        computing = [sequence for sequence in running if not sequence.written]
        shortest = min((each.missing for each in (*computing, *waiting) if not each.waited), default=0)
        late = self._held_steps >= MAX_HELD_STEPS
        held = [] if late else [each for each in computing if shortest and stands_back(each.missing, shortest)]
        self._held_steps = self._held_steps + 1 if held else 0
        return frozenset(held)


def begun_within(prompts: Iterable[Sequence], tokens: int) -> list[Sequence]:
    """The first of ``prompts``, as far as ``tokens`` go."""
    begun: list[Sequence] = []
    for prompt in prompts:
        if tokens <= 0:
            break
        begun.append(prompt)
        tokens -= prompt.missing
    return begun
