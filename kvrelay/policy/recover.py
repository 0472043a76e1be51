"""After a decode worker is lost in mid-answer: what can go on elsewhere and how, when silence counts as a loss, and how
fast prompts may be computed again. It must never let an answer go on where a word of it could change."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kvrelay.policy.patience import SILENT_LEASES
from kvrelay.types import Value

MAX_IN_A_ROW = 8
"""Losses that one answer outlives before it gets on."""
PROGRESS_TOKENS = 16
"""An answer made progress when so many tokens were written since its last loss. A request that crashes its workers at
some token does so wherever it goes on from there: a word or two, after which it is not under suspicion
(``policy.crash_history``), are no progress."""
MAX_IN_ALL = 32
"""Losses that one answer outlives however far it gets between them."""


MAX_REPLAY_S = 30.0
"""Longest predicted replay. The client gets nothing meanwhile, and most clients wait no longer than a minute. Where a
replay would take longer, the client is told to ask again."""


MAX_DOUBTS = 4.0
"""Largest factor by which an answer's limit of silence grows while it is moved without a token written."""


DUE_MARGIN = 4.0
"""A first token may take so many times its predicted time: queues grow after a prediction."""


class Strategy(StrEnum):
    """Where most of the KV comes from with which an answer goes on."""

    PREFILL = "prefill"
    """Prompt and journal are computed again."""
    RESTORE = "restore"
    """The store beside the worker that was lost has it."""
    REPLICA = "replica"
    """Another store has it."""
    ENGINE = "engine"
    """The engine that goes on, or computes for it, has it in its own cache."""
    UNDERWAY = "underway"
    """Another request has it computed or brought."""


class Losses(Value, frozen=True, kw_only=True):
    """How often one answer lost its worker. To be moved by those who drain a worker is no loss."""

    in_a_row: int = 0
    """Since it last got on."""
    in_all: int = 0
    tokens: int = 0
    """Written when it was lost last."""

    def another(self, tokens: int) -> Losses:
        """One more, after ``tokens`` were written of all choices."""
        got_on = tokens - self.tokens >= PROGRESS_TOKENS
        return Losses(in_a_row=1 if got_on else self.in_a_row + 1, in_all=self.in_all + 1, tokens=tokens)

    @property
    def are_too_many(self) -> bool:
        """The answer ends here."""
        return self.in_a_row > MAX_IN_A_ROW or self.in_all > MAX_IN_ALL


class Manner(StrEnum):
    """How an answer goes on elsewhere."""

    CONTINUE = "continue"
    """The prompt and what was written of the answer become the prompt; their pages are found by name."""
    REPLAY = "replay"
    """The request is asked again as it was, and its first tokens are forced to be those that were written."""
    RESTART = "restart"
    """Nothing reached the client: it is asked again."""
    FAIL = "fail"
    """The client is told that its answer ends here."""


SURVIVES = frozenset(
    {
        # What is asked, and of whom; the prompt itself is replaced by token ids.
        "model", "prompt", "messages", "stream", "stream_options", "n", "user", "store", "metadata", "service_tier",
        "request_id", "session_id", "priority", "return_token_ids", "safety_identifier",
        # How the prompt was rendered: it is token ids now.
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents",
        "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "tools", "parallel_tool_calls",
        # Samplers that look at one step alone, or at the prompt and the answer alike.
        "temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "repetition_penalty", "logprobs",
        "top_logprobs", "return_tokens_as_token_ids",
        # Ends: what was written is taken off the limits, and the router looks for stop strings itself.
        "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
        "include_stop_str_in_output", "skip_special_tokens",
    }
)  # fmt: skip
"""Fields of a request that mean the same to its rest as to its whole. Any other one that is set needs a replay."""
PER_OUTPUT = frozenset(
    {
        "seed", "presence_penalty", "frequency_penalty", "bad_words", "response_format", "structured_outputs",
        "tool_choice",
    }
)  # fmt: skip
"""Fields with a state that begins at the first token of the output: known to be right when it is replayed."""


def manner(fields: Iterable[str], *, replays: bool) -> Manner:
    """How a request whose ``fields`` are set goes on; ``replays``: its workers can force tokens."""
    strange = set(fields) - SURVIVES
    if not strange:
        return Manner.CONTINUE
    return Manner.REPLAY if replays and strange <= PER_OUTPUT else Manner.FAIL


def may_replay(tokens: int, step_s: float) -> bool:
    """Whether ``tokens`` steps of a worker that takes ``step_s`` for each are soon over."""
    return tokens * step_s <= MAX_REPLAY_S


class Patience(Value, frozen=True, kw_only=True):
    """When a worker that says nothing counts as lost. It has to be silent in two ways: silence of one stream alone may
    be a queue, and silence of heartbeats alone does no harm to a stream that flows."""

    stream_s: float
    """A request heard nothing for so long."""
    worker_s: float
    """Its worker showed no life for so long: no heartbeat, or heartbeats that tell of no progress."""
    pages_s: float = 120.0
    """A worker that waits for pages may be silent for so long after whoever computes or sends them was heard of."""
    steps: float = 8.0
    """A request waits for at least so many predicted steps."""
    leave_s: float = 6.0
    """An answer that nobody can write at the moment waits for a worker that was heard so lately, and so long."""
    alone_s: float = 30.0
    """An answer that was begun waits no longer for its next word, however busy its worker is with others; up to four
    times as long where it was moved and may have to queue."""

    def is_over(self, silent_s: float, worker_silent_s: float, step_s: float, moves: int = 0) -> bool:
        """Whether somebody else should write the answer on, which was moved ``moves`` times since its last word.

        Each of them has cost it its place in a queue. Without more patience every short pause of a worker would send
        all that wait there to the end of another queue, which grows by that: then many never get a word.
        """
        return silent_s > self.silence_s(step_s) and worker_silent_s > self.worker_s * _doubts(moves)

    def forget_s(self, due_s: float = 0.0, moves: int = 0) -> float:
        """Longest silence about a request of a worker that makes progress with others; ``moves`` as above. A word of it
        was predicted within ``due_s``; 0 once there were some."""
        return self.alone_s * _doubts(moves) + DUE_MARGIN * due_s

    def is_hopeless(self, silent_s: float, worker_silent_s: float, forget_s: float) -> bool:
        """Whether nobody should wait on where nobody else could write: the client is told instead.

        The engine stands still for so long that it will not wake up, or others were served while it was passed over for
        many times ``forget_s``.
        """
        return min(silent_s, worker_silent_s) > self.alone_s or silent_s > MAX_DOUBTS * forget_s

    def silence_s(self, step_s: float) -> float:
        """Longest silence of a stream whose worker takes ``step_s`` for a step and shows no life. One that was slow is
        not waited for much longer than its client does."""
        return max(self.stream_s, min(self.alone_s, self.steps * step_s))


def _doubts(moves: int) -> float:
    return min(2.0**moves, MAX_DOUBTS)


def patience(dead_after_s: float, transfer_wait_s: float = 120.0) -> Patience:
    """So that a loss is noticed within ``dead_after_s``, a look at the clock every 0.2 s included."""
    return Patience(
        stream_s=0.75 * dead_after_s,
        worker_s=0.5 * dead_after_s,
        pages_s=transfer_wait_s,
        leave_s=SILENT_LEASES * dead_after_s,
    )


class Pace(Value, frozen=True, kw_only=True):
    """A token bucket of prefill seconds: a death must not make every worker compute lost prompts and nothing else."""

    share: float = 0.5
    """Share of each worker's time that such prefills get in the long run."""
    burst_s: float = 1.0
    """Prefill seconds that may begin at once, for each worker."""
    spent_s: float = 0.0
    at_s: float = 0.0

    def _spent(self, now: float, workers: int) -> float:
        return max(0.0, self.spent_s - self.share * workers * max(0.0, now - self.at_s))

    def allows(self, now: float, workers: int) -> bool:
        """Whether another prompt may be computed again. A long one may overdraw: it would never begin otherwise."""
        return self._spent(now, workers) < self.burst_s * workers

    def spend(self, seconds: float, now: float, workers: int) -> Pace:
        """``seconds`` of prefill begin."""
        return msgspec.structs.replace(self, spent_s=self._spent(now, workers) + seconds, at_s=now)
