"""After a decode worker is lost in mid-answer: what can go on elsewhere and how, when silence counts as a loss, and how
fast prompts may be computed again. It must never let an answer go on where a word of it could change."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kvrelay.policy.patience import SILENT_LEASES
from kvrelay.types import Value

MAX_IN_A_ROW = 8
"""Losses in a row that one answer outlives without progress."""
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
    """The engine that goes on, or its prefill engine, has it in its own cache."""
    UNDERWAY = "underway"
    """Another request has it computed or brought."""


class Losses(Value, frozen=True, kw_only=True):
    """How often one answer lost its worker. A move off a draining worker is no loss."""

    in_a_row: int = 0
    """Losses since the answer last made progress."""
    in_all: int = 0
    tokens: int = 0
    """Tokens of all choices that were written when it was lost last."""

    def another(self, tokens: int) -> Losses:
        """One more, after ``tokens`` were written of all choices."""
        got_on = tokens - self.tokens >= PROGRESS_TOKENS
        return Losses(in_a_row=1 if got_on else self.in_a_row + 1, in_all=self.in_all + 1, tokens=tokens)

    @property
    def are_too_many(self) -> bool:
        """Whether the answer ends with an error instead of going on."""
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
    """Limits of silence after which a worker counts as lost. Two silences make a loss: a silent stream alone may be in
    a queue, and missing heartbeats alone do no harm to a stream that flows."""

    stream_s: float
    """Longest silence of a stream, unless ``steps`` steps take longer."""
    worker_s: float
    """Longest time without a heartbeat of the worker that shows progress."""
    pages_s: float = 120.0
    """Longest silence of a worker that waits for pages, since the last sign of their prefill worker or store."""
    steps: float = 8.0
    """Steps of the worker that a stream may be silent for, where they take longer than ``stream_s``."""
    leave_s: float = 6.0
    """Longest wait of an answer that no worker can take now, for one that was heard within this time."""
    alone_s: float = 30.0
    """Longest silence of an answer that was begun, however busy its worker is with other requests; up to four times
    that where the answer was moved and may have to queue."""

    def is_over(self, silent_s: float, worker_silent_s: float, step_s: float, moves: int = 0) -> bool:
        """Whether another worker should go on with an answer that was moved ``moves`` times since its last token.

        Each move has cost the answer its place in a queue, so its next worker may be silent for longer. Otherwise every
        short pause of a worker would send all that queue there to the end of another queue, and make that one longer:
        many answers would never get a token.
        """
        return silent_s > self.silence_s(step_s) and worker_silent_s > self.worker_s * _doubts(moves)

    def forget_s(self, due_s: float = 0.0, moves: int = 0) -> float:
        """Longest silence of a worker about one request while it makes progress with others. ``due_s``: predicted time
        to the request's first token, 0 once it came; ``moves``: moves since its last token."""
        return self.alone_s * _doubts(moves) + DUE_MARGIN * due_s

    def is_hopeless(self, silent_s: float, worker_silent_s: float, forget_s: float) -> bool:
        """Whether the answer should end with an error rather than wait on, when no other worker could go on with it.

        Either the engine has stood still for so long that it will not wake up, or it has served other requests for
        several times ``forget_s``.
        """
        return min(silent_s, worker_silent_s) > self.alone_s or silent_s > MAX_DOUBTS * forget_s

    def silence_s(self, step_s: float) -> float:
        """Longest silence of a stream whose worker takes ``step_s`` for a step and shows no progress. It is bounded by
        ``alone_s``, however slow the worker was: a client does not wait much longer."""
        return max(self.stream_s, min(self.alone_s, self.steps * step_s))


def _doubts(moves: int) -> float:
    return min(2.0**moves, MAX_DOUBTS)


def patience(dead_after_s: float, transfer_wait_s: float = 120.0) -> Patience:
    """Limits with which a loss is noticed within ``dead_after_s``, with a look at the clock every 0.2 s."""
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
