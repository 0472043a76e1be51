"""What every choice costs, in seconds, item by item, for all workers at once. It must never read the fleet itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.policy.fit import Floats
from kvrelay.policy.perf import prefill_seconds, step_seconds
from kvrelay.types import Value

Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]

MIN_FREE_SHARE = 0.01
"""Free KV share below which the price of a block stops rising: an overfull worker stays comparable."""

EFFORT_SHARE = 0.1
"""Price of a second that a prefill worker computes. At zero, prompts with one prefix that come at once would all be
computed, each on an idle worker: that is as fast as to wait for the first, and leaves no worker for anybody else. A
tenth keeps a queue at the holder of a prefix from growing: beyond that the prefix is computed elsewhere."""


class Item(StrEnum):
    """Parts of the sum. Up to ``ANSWER`` they are the request's own time to its first token, in order."""

    QUEUE = "queue"
    """Wait for the prompts before this one."""
    SOURCE = "source"
    """Beyond the queue: wait for a cached prefix that has to come from a tier, a peer or a running prefill."""
    PREFILL = "prefill"
    TRANSFER = "transfer"
    """The part of the hand-off that the prefill does not hide."""
    DECODE_WAIT = "decode_wait"
    """Wait for D's KV blocks, and for the prompts that D computes itself."""
    ANSWER = "answer"
    """From KV in place to a token at the router."""
    HARM = "harm"
    """Delay of D's running requests, times how many they are."""
    EFFORT = "effort"
    """Price of a prefill worker's time: whoever comes next could use it."""
    PRESSURE = "pressure"
    """Price of D's last free KV blocks."""


OWN = tuple(list(Item)[: list(Item).index(Item.ANSWER) + 1])
"""Items that add up to the predicted TTFT."""


class Prompt(Value, frozen=True, kw_only=True):
    """What is asked for."""

    tokens: int
    sequences: int = 1
    output_tokens: float
    """Expected length of each answer."""
    other_tokens: int = 0
    """Of the request's other prompts: D has to hold them as well."""

    @property
    def held_tokens(self) -> float:
        """KV that D will hold when the answer is written."""
        return self.tokens + self.other_tokens + self.sequences * self.output_tokens


class Kind(StrEnum):
    """Where a prefix could come from."""

    ENGINE = "engine"
    """It is in the worker's own cache."""
    STORE = "store"
    """Its node's store has it."""
    PEER = "peer"
    """Another node's store has it, and could push it to this node's."""
    UNDERWAY = "underway"
    """A worker computes it, or a store pushes it: it will be in reach."""


class Source(NamedTuple):
    """One of them; ``origin`` names the peer, or what is under way."""

    kind: Kind
    origin: str = ""


@dataclass(frozen=True)
class Sources:
    """Where workers could get a prefix of this prompt from."""

    known: tuple[Source, ...]
    tokens: Floats
    """``[source][worker]``: length of the prefix; 0: nothing there."""
    seconds: Floats
    """``[source][worker]``: until it is in the worker's reach. It runs while the prompt queues."""

    def plus(self, more: Sources) -> Sources:
        """These and, where they are no better, ``more``."""
        tokens, seconds = np.vstack([self.tokens, more.tokens]), np.vstack([self.seconds, more.seconds])
        return Sources((*self.known, *more.known), tokens, seconds)


@dataclass(frozen=True)
class Readers:
    """Workers that could compute this prompt, as ``[worker]`` arrays."""

    names: tuple[str, ...]
    rates: Floats
    """``[3][worker]``, of ``perf.prefill_amounts``."""
    queue_s: Floats
    sources: Sources
    """The first is what the worker holds already."""
    token_bytes: Floats
    """KV of one token as each worker writes it, all layers."""
    last_chosen: Integers
    """Order of its last choice; equals take turns."""


@dataclass(frozen=True)
class Writers:
    """Workers that could write the answer, as ``[worker]`` arrays."""

    readers: Readers
    """The same workers as places to compute the prompt."""
    step_rates: Floats
    """``[3][worker]``, of ``perf.step_seconds``."""
    answer_s: Floats
    sequences: Floats
    usual_sequences: Floats
    """How many it runs as a rule: who is idle now may not be idle in a moment."""
    kv_tokens: Floats
    kv_capacity_tokens: Floats
    remaining_tokens: Floats
    """Mean number of tokens that its requests have yet to write."""
    computes: Flags
    """Whether it may compute this prompt itself."""


@dataclass(frozen=True)
class Ways:
    """From each reader to each writer, as ``[reader][writer]`` arrays."""

    allowed: Flags
    latency_s: Floats
    s_per_byte: Floats
    in_flight_bytes: Floats
    stored_tokens: Floats
    """Prefix of this prompt, in the reader's kind of pages, that the writer's node has: only the rest travels."""


@dataclass(frozen=True)
class Reading:
    """What it takes each worker to compute the prompt, from its best source: ``[worker]`` each."""

    source: Integers
    """Position of the best source."""
    cached_tokens: Floats
    source_s: Floats
    """Wait for the prefix, beyond the queue."""
    prefill_s: Floats


def uncached_tokens(prompt_tokens: int, cached_tokens: int) -> int:
    """Tokens that P has to compute: at least one, since an engine never skips the last token."""
    return max(1, prompt_tokens - cached_tokens)


def read(prompt: Prompt, readers: Readers, price: Floats | float = 1.0) -> Reading:
    """Each worker computes the prompt from the source with which it is done first.

    ``price``: of a second of prefill, its own second included: ``[worker]`` or one for all.
    """
    tokens = readers.sources.tokens
    wait_s = np.where(tokens > 0, np.maximum(0.0, readers.sources.seconds - readers.queue_s), 0.0)
    new = np.maximum(1.0, prompt.tokens - tokens)
    prefill_s = prefill_seconds(readers.rates, new, prompt.tokens - new)
    best = np.argmin(wait_s + price * prefill_s, axis=0)
    every = np.arange(len(readers.names))
    return Reading(
        source=best,
        cached_tokens=prompt.tokens - new[best, every],
        source_s=wait_s[best, every],
        prefill_s=prefill_s[best, every],
    )


def transfer_s(prompt: Prompt, readers: Readers, reading: Reading, ways: Ways) -> Floats:
    """``[reader][writer]``: latency, and what the link has not moved when the prefill is done."""
    size_bytes = np.maximum(0.0, prompt.tokens - ways.stored_tokens) * readers.token_bytes[:, np.newaxis]
    moved_s = ways.s_per_byte * (size_bytes + ways.in_flight_bytes)
    return np.asarray(ways.latency_s + np.maximum(0.0, moved_s - reading.prefill_s[:, np.newaxis]))


def kv_pressure(kv_tokens: Floats, capacity_tokens: Floats) -> Floats:
    """Rising price of a worker's last free KV: 0.01 at half full, 0.09 at nine tenths, 1 at the brim, then linear."""
    share = kv_tokens / np.maximum(1.0, capacity_tokens)
    return np.asarray(MIN_FREE_SHARE * share / np.maximum(MIN_FREE_SHARE, 1.0 - share))


@dataclass(frozen=True)
class Writing:
    """What it costs to have each worker write the answer: ``[worker]`` each, in seconds."""

    wait_s: Floats
    harm_s: Floats
    pressure_s: Floats
    step_s: Floats
    """Predicted TPOT."""


def write(prompt: Prompt, writers: Writers) -> Writing:
    """The answer joins each worker's running requests."""
    need = prompt.held_tokens
    before_s = step_seconds(writers.step_rates, writers.sequences, writers.kv_tokens)
    after_s = step_seconds(writers.step_rates, writers.sequences + prompt.sequences, writers.kv_tokens + need)
    lacking = np.maximum(0.0, writers.kv_tokens + need - writers.kv_capacity_tokens)
    share = np.minimum(1.0, lacking / np.maximum(1.0, writers.kv_tokens))
    again_s = prefill_seconds(writers.readers.rates, np.array([prompt.tokens]), np.zeros(1))
    return Writing(
        # Its requests free their blocks one after the other, over the time that they still run.
        wait_s=share * writers.remaining_tokens * before_s + writers.readers.queue_s,
        harm_s=(after_s - before_s) * writers.sequences * prompt.output_tokens,
        # At the brim somebody is preempted, and a prompt like this one is computed again.
        pressure_s=kv_pressure(writers.kv_tokens + need, writers.kv_capacity_tokens) * again_s,
        step_s=after_s,
    )


def harmed(writers: Writers) -> Floats:
    """``[writer]``: how many requests stand still while it computes a prompt itself."""
    return np.maximum(writers.sequences, writers.usual_sequences)


def prefill_harm_s(reading: Reading, writers: Writers) -> Floats:
    """``[writer]``: how long its running requests stand still while it computes the prompt itself, times how many."""
    return np.asarray(reading.prefill_s * harmed(writers))
