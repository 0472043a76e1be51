"""The simulated engine's scheduler: continuous batching with chunked prefill, one step at a time, as vLLM does it.

It must never do I/O or read a clock: ``now`` comes in, and what a step would take comes out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay import identity
from kvrelay.deploy.mock.author import Author, advance
from kvrelay.deploy.mock.kv_cache import KvCache
from kvrelay.deploy.mock.order import Order, begun_within
from kvrelay.deploy.mock.sequence import Ending, Sequence
from kvrelay.deploy.mock.timing import Chunk
from kvrelay.policy.patience import beside_answers
from kvrelay.types import Value

MAX_SEQUENCES = 256
"""vLLM's own limit of running requests."""


class Limits(Value, frozen=True, kw_only=True):
    """What a step and a block may take."""

    block_tokens: int
    max_batched_tokens: int
    shared_chunk_tokens: int
    """Most tokens of one prompt in a step that others want, too; 0: no such limit."""


class Times(Protocol):
    """How fast the engine is."""

    def step_s(self, chunks: Iterable[Chunk], sequences: int, kv_tokens: int) -> float:
        """One step: chunks of prompts, and a token for each of ``sequences``, which read ``kv_tokens`` together."""


class PageSource(Protocol):
    """What lies outside of the engine: pages to load and to save."""

    def find(self, sequence: Sequence, local_tokens: int, now: float) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded; None: ask again later."""

    def load_s(self, sequence: Sequence) -> float:
        """How long loading ``sequence.loaded_tokens`` takes from now on."""

    def loaded(self, sequence: Sequence) -> None:
        """The loaded tokens are in the engine's cache."""

    def begins(self, sequence: Sequence, until: int) -> None:
        """A step that computes the tokens up to ``until`` begins."""

    def computed(self, sequence: Sequence, begun_s: float, now: float) -> None:
        """A step that computed tokens of it since ``begun_s`` is over."""

    def ended(self, sequence: Sequence, now: float) -> None:
        """The engine is through with it, in whatever way."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine computes next, and how long that takes."""

    parts: list[tuple[Sequence, int]]
    """Sequences and how many of their tokens."""
    begun_s: float
    seconds: float


@dataclass
class Totals:
    """Tokens since the engine began, by where their KV came from."""

    computed: int = 0
    local: int = 0
    loaded: int = 0
    written: int = 0
    endings: dict[Ending, int] = field(default_factory=lambda: dict.fromkeys(Ending, 0))
    preemptions: int = 0


class Scheduler:
    """Sequences that wait, load or run in one engine."""

    def __init__(self, cache: KvCache, timing: Times, limits: Limits, pages: PageSource, author: Author) -> None:
        self.cache = cache
        self.totals = Totals()
        self._timing = timing
        self._limits = limits
        self._pages = pages
        self._author = author
        self._waiting: deque[Sequence] = deque()
        self._loading: dict[Sequence, float] = {}
        """With the time at which the load ends."""
        self._loaded: deque[Sequence] = deque()
        """Those that wait with blocks; they come in before the others."""
        self._running: dict[Sequence, None] = {}
        self._order = Order()
        self._chunk_tokens = limits.shared_chunk_tokens
        """Most tokens of one prompt in this step, unless it is alone."""
        self._held: Collection[Sequence] = ()
        """Those of the running ones that have no part in this step."""

    def __repr__(self) -> str:
        return f"<Scheduler {self.running} running, {self.waiting} waiting, {self.cache!r}>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Loading ones included, as in vLLM's metrics."""
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence, now: float) -> None:
        """Nobody wants it any more; harmless for one that has ended."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._loading:
            del self._loading[sequence]
        elif sequence in self._loaded:
            self._loaded.remove(sequence)
        elif sequence in self._running:
            del self._running[sequence]
        else:
            return
        self._end(sequence, now)

    def wake_s(self) -> float | None:
        """When the first of the loads ends; None without any."""
        return min(self._loading.values(), default=None)

    # ------------------------------------------------------------ a step begins

    def plan(self, now: float) -> Step | None:
        """The next step; None when nothing can be computed now."""
        self._finish_loads(now)
        part, budget = self._choose()
        parts: dict[Sequence, int] = {}
        for sequence in part:
            count = min(self._share(sequence), budget)
            if count and sequence in self._running and self._make_room(sequence, sequence.computed + count):
                parts[sequence] = count
                budget -= count
        parts.update(self._admit(budget, now))
        chosen = [part for part in parts.items() if part[0] in self._running]  # others were preempted after their turn
        for sequence, count in chosen:
            self._pages.begins(sequence, sequence.computed + count)
        return Step(chosen, now, self._seconds(chosen)) if chosen else None

    def _choose(self) -> tuple[list[Sequence], int]:
        """Sequences that take part in the step, in turn, and the step's tokens; as ``connector.short_first`` does
        it."""
        budget, shared_tokens = self._limits.max_batched_tokens, self._limits.shared_chunk_tokens
        self._chunk_tokens, self._held = shared_tokens, ()
        if not shared_tokens:
            return list(self._running), budget
        may_choose = self._may_choose()
        self._held = self._order.stand_back(self._running if may_choose else (), self._waiting)
        part = [each for each in self._running if each not in self._held]
        decoding = [each for each in part if each.written]
        if not decoding:
            return part, budget
        prompts, chunk_tokens = [each for each in part if not each.written], beside_answers(shared_tokens)
        sharing = 1 if may_choose else max(1, len(prompts))
        self._chunk_tokens = max(1, chunk_tokens // sharing)
        budget = min(budget, len(decoding) + max(chunk_tokens, sharing) + self.waiting)
        return decoding + begun_within(prompts, chunk_tokens) if may_choose else part, budget

    def _may_choose(self) -> bool:
        """Whether sequences may be chosen out of order. Not where blocks may run out: running ones are preempted in the
        order in which they were let in."""
        most_blocks = self.running + self._limits.max_batched_tokens // self._limits.block_tokens
        free_blocks = self.cache.blocks - self.cache.used_blocks
        return most_blocks <= free_blocks and self.running + self.waiting <= MAX_SEQUENCES

    def _share(self, sequence: Sequence) -> int:
        """How many tokens of ``sequence`` one step computes at most."""
        limit = self._chunk_tokens
        alone = self.running + self.waiting - len(self._held) <= 1
        return sequence.missing if alone or not limit else min(sequence.missing, limit)

    def _admit(self, budget: int, now: float) -> Iterator[tuple[Sequence, int]]:
        """First come, first served; those whose pages are still to come are passed by, and block nobody."""
        passed: list[Sequence] = []
        while (queue := self._loaded or self._waiting) and budget and self.running < MAX_SEQUENCES:
            sequence = queue[0]
            count = self._enter(sequence, budget, now)
            if count is None:
                break
            queue.popleft()
            if count:
                self._running[sequence] = None
                budget -= count
                yield sequence, count
            elif sequence not in self._loading:
                passed.append(sequence)
        self._waiting.extendleft(reversed(passed))

    def _enter(self, sequence: Sequence, budget: int, now: float) -> int | None:
        """Tokens to compute of it in its first step; 0: its pages are on their way; None: there is no room for it."""
        if not sequence.held:
            most = (len(sequence.tokens) - 1) // self._limits.block_tokens  # the last token is always computed
            hits = self.cache.match(sequence.names[:most])
            found = self._pages.find(sequence, hits * self._limits.block_tokens, now)
            if found is None or (found and self._load(sequence, hits, found, now)):
                return 0
            if found:
                return None
            self._hold(sequence, hits)
        count = min(self._share(sequence), budget)
        if self._grow(sequence, sequence.computed + count):
            return count
        if sequence.computed == sequence.local_tokens:
            self._give_back(sequence)
        return None

    def _hold(self, sequence: Sequence, hits: int) -> None:
        self.cache.hold(sequence.names[:hits])
        sequence.held = sequence.named = hits
        sequence.computed = sequence.local_tokens = hits * self._limits.block_tokens

    def _load(self, sequence: Sequence, hits: int, found: int, now: float) -> bool:
        """Begin to load ``found`` tokens; whether there was room."""
        self._hold(sequence, hits)
        if not self._grow(sequence, sequence.computed + found):
            self._give_back(sequence)
            return False
        sequence.loaded_tokens = found
        self._loading[sequence] = now + self._pages.load_s(sequence)
        return True

    def _finish_loads(self, now: float) -> None:
        for sequence in [each for each, ready_s in self._loading.items() if ready_s <= now]:
            del self._loading[sequence]
            there = sequence.computed + sequence.loaded_tokens
            sequence.computed = min(there, len(sequence.tokens) - 1)
            self._name(sequence, there)
            self._pages.loaded(sequence)
            self._loaded.append(sequence)

    # ------------------------------------------------------------ room

    def _grow(self, sequence: Sequence, until: int) -> bool:
        """Let it hold blocks for its tokens up to ``until``."""
        lacking = -(-until // self._limits.block_tokens) - sequence.held
        if lacking > 0:
            if not self.cache.take(lacking):
                return False
            sequence.held += lacking
        return True

    def _make_room(self, sequence: Sequence, until: int) -> bool:
        """Preempt the last ones that were let in until ``sequence`` can go on; False when it was one of them."""
        while not self._grow(sequence, until):
            last, _ = self._running.popitem()
            self._give_back(last)
            last.loaded_tokens = 0
            self._waiting.appendleft(last)
            self.totals.preemptions += 1
            if last is sequence:
                return False
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.release(sequence.names[: sequence.named], sequence.held - sequence.named)
        sequence.held = sequence.named = sequence.computed = 0

    # ------------------------------------------------------------ a step ends

    def _seconds(self, parts: list[tuple[Sequence, int]]) -> float:
        chunks, sequences, kv_tokens = [], 0, 0
        for sequence, count in parts:
            if count == 1:
                sequences += 1
                kv_tokens += sequence.computed
            else:
                chunks.append(Chunk(new_tokens=count, past_tokens=sequence.computed))
        return self._timing.step_s(chunks, sequences, kv_tokens)

    def complete(self, step: Step, now: float) -> list[tuple[Sequence, int]]:
        """``step`` is over: the sequences that got a token, and the token. Aborted ones get none."""
        written = []
        for sequence, count in step.parts:
            if sequence in self._running:
                sequence.computed += count
                self._name(sequence, sequence.computed)
                self._pages.computed(sequence, step.begun_s, now)
                if not sequence.missing:
                    written.append((sequence, self._write(sequence, now)))
        return written

    def _name(self, sequence: Sequence, until: int) -> None:
        """Its blocks below ``until`` are full."""
        full = until // self._limits.block_tokens
        if full > sequence.named:
            identity.extend_names(sequence.names, sequence.root, sequence.tokens, self._limits.block_tokens)
            self.cache.fill(sequence.names[sequence.named : full])
            sequence.named = full

    def _write(self, sequence: Sequence, now: float) -> int:
        if not sequence.written:
            self._count(sequence)
        may_end = not sequence.ignore_end and sequence.written >= sequence.min_tokens
        token = self._author.next(sequence.state, may_end=may_end, choice=sequence.choice)
        sequence.state = advance(sequence.state, token)
        sequence.tokens.append(token)
        self.totals.written += 1
        if may_end and self._author.is_end(token):
            sequence.ending = Ending.STOP
        elif sequence.written >= sequence.max_tokens:
            sequence.ending = Ending.LENGTH
        if sequence.ending is not None:
            self.totals.endings[sequence.ending] += 1
            del self._running[sequence]
            self._end(sequence, now)
        return token

    def _count(self, sequence: Sequence) -> None:
        """Its prompt is through: where its KV came from. Of a prompt that was all there, one token is computed."""
        cached = min(sequence.cached_tokens, sequence.prompt_tokens - 1)
        self.totals.local += sequence.local_tokens
        self.totals.loaded += cached - sequence.local_tokens
        self.totals.computed += sequence.prompt_tokens - cached

    def _end(self, sequence: Sequence, now: float) -> None:
        self._pages.ended(sequence, now)
        self._give_back(sequence)
