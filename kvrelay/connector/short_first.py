"""vLLM's scheduler, but long prompts stand back for much shorter ones, and prompts take little of a step that writes
answers. It must never hold back who writes an answer, nor a prompt for ever.

In vLLM all prompts that are being computed share each step, running ones first: a short prompt waits for the end of a
step that a long one has for itself, and is then computed in one that is twice as long for the long one's part. Where
answers are written, a prompt makes each of them wait for its part of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvrelay.policy.patience import MAX_HELD_STEPS, beside_answers, stands_back


class ShortFirst(Scheduler):
    """Chooses who takes part in a step, and leaves the step itself to vLLM."""

    running: list[Request]
    _held_steps = 0
    """Steps in a row without a long prompt that could have had a part in them."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        held = self._held() if self._held_steps < MAX_HELD_STEPS else []
        self._held_steps = self._held_steps + 1 if held else 0
        shared_tokens = self.scheduler_config.long_prefill_token_threshold
        if any(not request.is_prefill_chunk for request in self.running):
            self.scheduler_config.long_prefill_token_threshold = beside_answers(shared_tokens)
        try:
            return self._schedule_without(held, throttle_prefills)
        finally:
            self.scheduler_config.long_prefill_token_threshold = shared_tokens

    def _schedule_without(self, held: list[Request], throttle_prefills: bool) -> SchedulerOutput:
        if not held:
            return super().schedule(throttle_prefills)
        before = self.running
        self.running = _without(before, held)
        try:
            return super().schedule(throttle_prefills)
        finally:
            # Back to their places: the last ones are preempted first when blocks run out.
            here = {*self.running, *held}
            self.running = [request for request in before if request in here] + _without(self.running, before)

    def _held(self) -> list[Request]:
        """Prompts under computation that let others go first in the next step."""
        computing = [request for request in self.running if request.is_prefill_chunk]
        if not computing or len(self.running) + len(self.waiting) > self.max_num_running_reqs:
            return []  # vLLM counts those who run, and would let in too many while some are held
        # Who was skipped waits for its KV, not for a step.
        waiting = (request for request in self.waiting if request not in self.deferred_waiting)
        shortest = min(map(_left, itertools.chain(computing, waiting)))
        return [request for request in computing if stands_back(_left(request), shortest)]


def _left(request: Request) -> int:
    """Tokens to compute; what a waiting request will find cached is not known yet."""
    return int(request.num_tokens - request.num_computed_tokens)


def _without(requests: Sequence[Request], others: Iterable[Request]) -> list[Request]:
    left_out = set(others)
    return [request for request in requests if request not in left_out]
