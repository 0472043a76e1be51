"""vLLM's scheduler, but long prompts stand back for much shorter ones, and prompts take little of a step that writes
answers. It must never hold back who writes an answer, nor a prompt for ever.

In vLLM all prompts that are being computed share each step, running ones first: a short prompt waits for the end of a
step that a long one has for itself, and is then computed in one that is twice as long for the long one's part. Where
answers are written, a prompt makes each of them wait for its part of the step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvrelay.policy.patience import MAX_HELD_STEPS, beside_answers, stands_back


class ShortFirst(Scheduler):
    """Chooses who takes part in a step, and leaves the step itself to vLLM."""

    running: list[Request]
    max_num_scheduled_tokens: int
    _held_steps = 0
    """Steps in a row without a long prompt that could have had a part in them."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        held = self._held() if self._held_steps < MAX_HELD_STEPS else []
        self._held_steps = self._held_steps + 1 if held else 0
        before, part = self.running, _without(self.running, held)
        writers = [request for request in part if not request.is_prefill_chunk]
        self.running = writers + _without(part, writers)
        try:
            with self._limits_beside(len(writers)):
                return super().schedule(throttle_prefills)
        finally:
            # Back to their places: the last ones are preempted first when blocks run out.
            here = {*self.running, *held}
            self.running = [request for request in before if request in here] + _without(self.running, before)

    @contextlib.contextmanager
    def _limits_beside(self, writers: int) -> Iterator[None]:
        """Prompts together get the chunk that is small enough for ``writers`` answers to wait for, one after another.

        Who waits may come in all the same: one whose KV was handed over has a single token to compute.
        """
        shared_tokens, step_tokens = self.scheduler_config.long_prefill_token_threshold, self.max_num_scheduled_tokens
        if writers:
            chunk_tokens = beside_answers(shared_tokens)
            self.scheduler_config.long_prefill_token_threshold = chunk_tokens
            self.max_num_scheduled_tokens = min(step_tokens, writers + chunk_tokens + len(self.waiting))
        try:
            yield
        finally:
            self.scheduler_config.long_prefill_token_threshold = shared_tokens
            self.max_num_scheduled_tokens = step_tokens

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
