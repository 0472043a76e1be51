"""How long to wait for what: numbers and their reasons only. It must never read a clock itself."""

from __future__ import annotations

import math

SILENT_LEASES = 3.0
"""Leases without a sign of health after which a worker's running requests are given up.

One missed lease takes new work away and moves prefills, which are cheap to do elsewhere. A stream that breaks is not:
three leases outlast a link that is dialled again and an engine that is busy for a moment, and yet are a time that a
client will wait.
"""
RENDER_S = 5.0
"""Longest wait for a worker to render a prompt: ten times what the longest takes. Without an answer the request is not
split, which costs less than to wait on."""
RENDER_TRIES = 2
"""Workers asked to render one prompt: the second is for the case that the first has just died."""
HOLD_S = 0.01
"""What it costs to be held back until a prefix is there, beside the wait: a message from its store, and one more round
to the worker."""
HELD_MARGIN = 0.5
"""Share of the predicted wait for a prefix that is added before it is given up: predictions are not exact."""
HELD_SLACK_S = 0.1
"""Beside it, for waits so short that messages take longer."""
LONGEST_HOLD_S = 30.0
"""Predicted waits for a prefix beyond this are not offered."""
MOST_HOLDS = 2
"""Times that one prompt waits for a prefix; the second one is for the case that the first one's worker died."""
MUCH_LONGER = 4.0
"""A prompt that has so many times as much left to compute lets another one go first: that costs it little, and saves
the other most of its wait. Prompts of about the same length gain nothing by changing places."""
BESIDE_ANSWERS = 0.5
"""Tokens of all prompts in a step that also decodes answers, as a share of the limit for one prompt in a shared step.
Each answer waits for the whole step, and a second step costs a prompt little more than the answers' own time."""
MAX_HELD_STEPS = 4
"""Steps in a row that a prompt stands back for others: it gets a part of every fifth one, however many they are."""


def held_until_s(now: float, predicted_s: float) -> float:
    """When a prompt is given up waiting for a prefix that is predicted to be there after ``predicted_s``."""
    return now + predicted_s * (1.0 + HELD_MARGIN) + HELD_SLACK_S


def longest_hold_s(transfer_wait_s: float) -> float:
    """Nobody is held for so long that its silence would count as that of a prefill worker."""
    return max(0.0, min(LONGEST_HOLD_S, (transfer_wait_s - HELD_SLACK_S) / (1.0 + HELD_MARGIN)))


def beside_answers(shared_chunk_tokens: int) -> int:
    """Most tokens of one prompt in a step that also writes answers; 0: no such limit."""
    return math.ceil(BESIDE_ANSWERS * shared_chunk_tokens)


def stands_back(tokens: float, others_tokens: float) -> bool:
    """Whether a prompt with ``tokens`` left to compute lets one with ``others_tokens`` go first."""
    return tokens >= MUCH_LONGER * others_tokens
