"""Seeded random numbers on a CPU engine that computes a prompt in several steps.

vLLM draws a number at every step of a prompt and takes back those of the steps that did not end it, by the offset that
GPU generators have. A CPU generator has none, and vLLM 0.32's engine ends itself on the first seeded request whose
prompt takes two steps. Here the numbers are taken back by the state.
"""

from __future__ import annotations

import torch


class RewindableGenerator(torch.Generator):  # type: ignore[misc]
    """A generator that forgets what was drawn since it was seeded, when its offset is set back.

    Right for a prompt's first run. A request that is preempted after it wrote tokens draws its numbers once more from
    the beginning: as valid as others, but not those of a run that nobody preempted.
    """

    _seeded: torch.Tensor | None = None

    def manual_seed(self, seed: int) -> torch.Generator:
        seeded = super().manual_seed(seed)
        self._seeded = self.get_state()
        return seeded

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        if self._seeded is not None:
            self.set_state(self._seeded)


def install() -> None:
    """Generators that are made from now on in this process can be rewound; for engines on CPU alone."""
    torch.Generator = RewindableGenerator
