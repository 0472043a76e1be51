"""What every choice costs, in seconds, item by item. It must never read the fleet itself.

One worker at a time, in plain numbers: a choice prices few of all pairs. ``bounds`` tells which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvrelay.policy.laws import Laws
from kvrelay.policy.perf import prefill_seconds, step_seconds
from kvrelay.types import Value

EFFORT_SHARE = 0.1
"""Price of a second that a prefill worker computes. At zero, prompts with one prefix that come at once would all be
computed, each on an idle worker: that is as fast as to wait for the first, and leaves no worker for anybody else. A
tenth keeps a queue at the holder of a prefix from growing: beyond that the prefix is computed elsewhere."""
LATE_SHARE = 0.5
"""Price of a second by which a running answer is delayed. A second before the first token makes all of an answer's
tokens late; a running one has, on average, half of them written."""


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
    """Wait for D's KV blocks, for prompts before this one that D computes itself, as far as that is not over when P is
    done, and for the answers that D writes in each step of a prompt of its own."""
    ANSWER = "answer"
    """From KV in place to a token at the router."""
    HARM = "harm"
    """Delay of D's running requests, and of prompts that stand back for this one, times how many they are."""
    EFFORT = "effort"
    """Price of a prefill worker's time: the next request could use it."""
    PRESSURE = "pressure"
    """Price of D's last free KV blocks."""


OWN = tuple(list(Item)[: list(Item).index(Item.ANSWER) + 1])
"""Items that add up to the predicted TTFT."""
WAITS = (Item.QUEUE, Item.SOURCE, Item.DECODE_WAIT)
"""Items of the TTFT that pass while a request waits in the router as well."""


class Prompt(Value, frozen=True, kw_only=True):
    """A prompt to be served, and the answers that are expected."""

    tokens: int
    sequences: int = 1
    output_tokens: float
    """Expected length of each answer."""
    other_tokens: int = 0
    """Tokens of the request's other prompts: D has to hold them as well."""

    @property
    def held_tokens(self) -> float:
        """KV that D will hold when the answer is written."""
        return self.tokens + self.other_tokens + self.sequences * self.output_tokens


class Kind(StrEnum):
    """Where a prefix could come from."""

    ENGINE = "engine"
    """The prefix is in the worker's own cache."""
    STORE = "store"
    """Its node's store has it."""
    PEER = "peer"
    """Another node's store has it, and could push it to this node's."""
    UNDERWAY = "underway"
    """A worker computes it, or a store pushes it: it will be in reach."""


class Source(NamedTuple):
    """Where one prefix would come from; ``origin`` names the peer store, or the work under way."""

    kind: Kind
    origin: str = ""


Offer = tuple[Source, float, float]
"""A prefix that a worker could have: where from, its tokens, and seconds until it is in the worker's reach, which run
while the prompt queues."""


class Offers(Protocol):
    """Prefixes that each worker could have, by its position; worked out when they are asked for."""

    def __getitem__(self, at: int, /) -> Sequence[Offer]:
        """Offers to the worker at this position, at least one."""


class Coming(NamedTuple):
    """A prefix that some workers could have a while later, brought the fastest way there is."""

    to: Sequence[int]
    """Positions of those workers."""
    pages: int
    tokens: float
    first_s: float
    page_s: float
    """Seconds that it takes at least: once, and for each page that the worker's node lacks. The last page may be a part
    of one, and is not brought."""


class Hints(NamedTuple):
    """What is known of ``Offers`` without a look at each worker: none of them is better than the best of this."""

    at_hand: Sequence[float]
    """Tokens that each worker could have at once."""
    stored: Sequence[int]
    """Leading pages that the store of each worker's node has."""
    coming: Sequence[Coming]

    def most_tokens(self) -> list[float]:
        """The longest prefix that each worker could have."""
        most = list(self.at_hand)
        for prefix in self.coming:
            for at in prefix.to:
                most[at] = max(most[at], prefix.tokens)
        return most


class PrefillColumns(Value, frozen=True, kw_only=True):
    """Workers that could compute this prompt, one column each."""

    names: Sequence[str]
    rates: Laws
    """Laws of ``perf.prefill_amounts``, in seconds."""
    queue_s: Sequence[float]
    passed: Sequence[int]
    """Prompts of each worker that let this one pass: while it is computed, none of them is."""
    offers: Offers
    """Prefixes that each worker could use; the first is the one that it holds already. Of equals the first one is
    taken."""
    hints: Hints
    token_bytes: Sequence[float]
    """KV of one token as each worker writes it, all layers."""
    last_chosen: Sequence[int]
    """When each worker was last chosen, as a rising number; equals take turns."""


class DecodeColumns(Value, frozen=True, kw_only=True):
    """Workers that could decode the answer, one column each."""

    as_prefills: PrefillColumns
    """The same workers as places to compute the prompt."""
    step_rates: Laws
    """Laws of ``perf.step_seconds``, in seconds."""
    answer_s: Sequence[float]
    sequences: Sequence[float]
    running: Sequence[float]
    """Sequences that each worker decodes at present, or usually if that is more: an idle worker may be busy in a
    moment."""
    kv_tokens: Sequence[float]
    kv_capacity_tokens: Sequence[float]
    remaining_tokens: float
    """Mean number of tokens that running requests have yet to write."""
    computes: Sequence[int]
    """Positions of the workers that may compute this prompt themselves."""
    chunk_tokens: Sequence[float]
    """Most tokens of this prompt that each worker computes in a step beside its answers; infinite where it runs
    none."""


class Ways(Value, frozen=True, kw_only=True):
    """Ways from prefill workers to decode workers, for one prompt."""

    prefills: Sequence[int]
    decodes: Sequence[int]
    """Positions of the workers of each side that may be used."""
    allowed: Sequence[Sequence[bool]]
    """``[prefill][decode]``: whether they understand each other."""
    sources: Sequence[int]
    targets: Sequence[int]
    """Each worker's store, as its position in the following tables, which are ``[store][store]``."""
    latency_s: Sequence[Sequence[float]]
    s_per_byte: Sequence[Sequence[float]]
    in_flight_bytes: Sequence[Sequence[float]]
    least_s: Sequence[float]
    """Latency of the fastest way from each prefill worker."""
    stored_tokens: Sequence[Sequence[float]]
    """``[prefill][decode]``: prefix of this prompt, in P's kind of pages, that D's node has: only the rest travels."""


class PrefillCost(NamedTuple):
    """What it takes a worker to compute the prompt, from its best source."""

    source: Source
    cached_tokens: float
    source_s: float
    """Wait for the prefix, beyond the queue."""
    prefill_s: float


def uncached_tokens(prompt_tokens: int, cached_tokens: int) -> int:
    """Tokens that P has to compute: at least one, since an engine never skips the last token."""
    return max(1, prompt_tokens - cached_tokens)


def prefill_cost(prompt: Prompt, prefills: PrefillColumns, at: int, price: float = 1.0) -> PrefillCost:
    """The worker computes the prompt from the source with which it is done first.

    ``price``: of a second of prefill, its own second included.
    """
    rates, queue_s, asked = prefills.rates[at], prefills.queue_s[at], prompt.tokens
    best, best_s = None, math.inf
    for source, tokens, seconds in prefills.offers[at]:
        new = asked - tokens if tokens < asked - 1.0 else 1.0
        wait_s = seconds - queue_s if tokens > 0 and seconds > queue_s else 0.0
        prefill_s = prefill_seconds(rates, new, asked - new)
        cost_s = wait_s + price * prefill_s
        if cost_s < best_s:
            best, best_s = PrefillCost(source, asked - new, wait_s, prefill_s), cost_s
    assert best is not None, "every worker has an offer, if it is that there is nothing"
    return best


def transfers_s(
    prompt: Prompt, prefills: PrefillColumns, prefill_s: float, ways: Ways, prefill: int, decodes: Iterable[int]
) -> list[float]:
    """For each decode worker: latency, and what the link has not moved when the prefill of ``prefill_s`` is done."""
    source, stored, targets = ways.sources[prefill], ways.stored_tokens[prefill], ways.targets
    latency_s, s_per_byte = ways.latency_s[source], ways.s_per_byte[source]
    in_flight_bytes, token_bytes, asked = ways.in_flight_bytes[source], prefills.token_bytes[prefill], prompt.tokens
    found = []
    for at in decodes:
        to, lacking = targets[at], asked - stored[at]
        size_bytes = lacking * token_bytes if lacking > 0.0 else 0.0
        exposed_s = s_per_byte[to] * (size_bytes + in_flight_bytes[to]) - prefill_s
        found.append(latency_s[to] + exposed_s if exposed_s > 0.0 else latency_s[to])
    return found


def prefill_price(prefills: PrefillColumns, at: int) -> float:
    """Price of a second of prefill on a worker that runs no answers: the prompt's own second, the worker's time, and a
    second of each prompt that it passes."""
    return 1.0 + EFFORT_SHARE + prefills.passed[at]


def between_chunks_s(prompt: Prompt, decodes: DecodeColumns, at: int, own: PrefillCost) -> float:
    """Wait of a prompt that the worker computes itself for the answers that are written in its steps. One step of them
    is a part of ``answer_s``."""
    steps = math.ceil((prompt.tokens - own.cached_tokens) / decodes.chunk_tokens[at])
    if steps <= 1:
        return 0.0
    return (steps - 1) * step_seconds(decodes.step_rates[at], decodes.sequences[at], decodes.kv_tokens[at])


def harmed(decodes: DecodeColumns, at: int) -> float:
    """Price of a second of prefill on a decode worker, beside the prompt's own second: the running answers and the
    prompts that stand still meanwhile."""
    return LATE_SHARE * decodes.running[at] + decodes.as_prefills.passed[at]
