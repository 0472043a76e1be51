"""How right the predictions were, and what wrong choices cost. It must never count a request that went another way than
it was predicted to."""

from __future__ import annotations

from collections import deque

from kvrelay.fleet.actual import Actual
from kvrelay.policy.fit import quantile_of
from kvrelay.policy.route import Decision

KEPT = 256


class Calibration:
    """Relative errors of the last predictions, and the regret of all."""

    def __init__(self, kept: int = KEPT) -> None:
        self._errors: dict[str, deque[float]] = {"ttft": deque(maxlen=kept), "tpot": deque(maxlen=kept)}
        self.predictions = 0
        """Requests whose first token was predicted and seen."""
        self.regret_s = 0.0
        """Seconds by which first tokens came later than the best runner-up's was predicted, all requests together."""

    def __repr__(self) -> str:
        return f"<Calibration of {self.predictions} predictions, ttft off by {self.error('ttft', 0.5):.2f}>"

    def add(self, decision: Decision, seen: Actual) -> None:
        """``decision`` was carried out as it was made, and ``seen`` is what came of it."""
        if seen.ttft_s is None:
            return
        self.predictions += 1
        self._note("ttft", decision.chosen.ttft_s, seen.ttft_s)
        if seen.tpot_s is not None:
            self._note("tpot", decision.chosen.tpot_s, seen.tpot_s)
        self.regret_s += regret_s(decision, seen.ttft_s)

    def _note(self, what: str, predicted_s: float, seen_s: float) -> None:
        if seen_s > 0.0:
            self._errors[what].append(abs(predicted_s / seen_s - 1.0))

    def error(self, what: str, quantile: float) -> float:
        """Quantile of ``|predicted - seen| / seen`` of the last ones; 1 when nothing was seen."""
        errors = self._errors[what]
        return quantile_of(errors, quantile) if errors else 1.0


def regret_s(decision: Decision, ttft_s: float) -> float:
    """What was lost by not taking the best runner-up, if its prediction was right."""
    others = [option.ttft_s for option in decision.runners_up]
    return max(0.0, ttft_s - min(others)) if others else 0.0
