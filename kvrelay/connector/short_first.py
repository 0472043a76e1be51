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
        may_choose = self._may_choose()
        held = self._held() if may_choose and self._held_steps < MAX_HELD_STEPS else []
        self._held_steps = self._held_steps + 1 if held else 0
        before, part = self.running, _without(self.running, held)
        writers = [request for request in part if not request.is_prefill_chunk]
        chunk_tokens = beside_answers(self.scheduler_config.long_prefill_token_threshold) if writers else 0
        if chunk_tokens and may_choose:
            self.running = writers + _begun_within(_without(part, writers), chunk_tokens)
        else:
            self.running = part
        left_out = _without(before, self.running)
        try:
            with self._limits_beside(len(writers), chunk_tokens, 1 if may_choose else len(part) - len(writers)):
                return super().schedule(throttle_prefills)
        finally:
            # Back to their places: the last ones are preempted first when blocks run out.
            here = {*self.running, *left_out}
            self.running = [request for request in before if request in here] + _without(self.running, before)

    def _may_choose(self) -> bool:
        """Whether some may be left out of a step, or have another place in it.

        vLLM counts those it sees running, and would let in too many; who waits with KV that is loaded counts as well.
        Where blocks may run out, it preempts the last one it sees: an old prompt behind those who write would lose its
        KV again and again, and who is left out would keep it at the cost of older ones.
        """
        if sum(self.get_request_counts()) > self.max_num_running_reqs:
            return False
        most_blocks = len(self.running) + self.max_num_scheduled_tokens // self.block_size
        return bool(most_blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks())

    @contextlib.contextmanager
    def _limits_beside(self, writers: int, chunk_tokens: int, sharing: int) -> Iterator[None]:
        """Prompts together get the chunk that is small enough for ``writers`` answers to wait for: one after another,
        or where ``sharing`` are in vLLM's own order, an equal part each. 0 tokens: vLLM's limits.

        Who waits may come in all the same: one whose KV was handed over has a single token to compute.
        """
        shared_tokens, step_tokens = self.scheduler_config.long_prefill_token_threshold, self.max_num_scheduled_tokens
        if chunk_tokens:
            sharing = max(1, sharing)
            waiting = self.get_request_counts()[1]
            self.scheduler_config.long_prefill_token_threshold = max(1, chunk_tokens // sharing)
            self.max_num_scheduled_tokens = min(step_tokens, writers + max(chunk_tokens, sharing) + waiting)
        try:
            yield
        finally:
            self.scheduler_config.long_prefill_token_threshold = shared_tokens
            self.max_num_scheduled_tokens = step_tokens

    def _held(self) -> list[Request]:
        """Prompts under computation that let others go first in the next step."""
        computing = [request for request in self.running if request.is_prefill_chunk]
        if not computing:
            return []
        # Who was skipped waits for its KV, not for a step.
        waiting = (request for request in self.waiting if request not in self.deferred_waiting)
        shortest = min(map(_left, itertools.chain(computing, waiting)))
        return [request for request in computing if stands_back(_left(request), shortest)]


def _begun_within(prompts: Sequence[Request], tokens: int) -> list[Request]:
    """The first of ``prompts``, as far as ``tokens`` go: the others would take what is for those who wait."""
    before = itertools.accumulate(map(_left, prompts), initial=0)
    return [prompt for prompt, used in zip(prompts, before, strict=False) if used < tokens]


def _left(request: Request) -> int:
    """Tokens to compute; what a waiting request will find cached is not known yet."""
    return int(request.num_tokens - request.num_computed_tokens)


def _without(requests: Sequence[Request], others: Iterable[Request]) -> list[Request]:
    left_out = set(others)
    return [request for request in requests if request not in left_out]
