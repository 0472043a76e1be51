"""Turns the fleet's state into vectors and asks policy to choose. It must never change that state."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import Ask, PromptLeg
from kvrelay.fleet.ground import Ground, Grounds, Place
from kvrelay.fleet.holdings import Depths, Holdings, stored_tokens
from kvrelay.fleet.loads import DecodeReservation, Loads, PrefillReservation
from kvrelay.fleet.rates import Law
from kvrelay.fleet.reach import Reach
from kvrelay.fleet.workers import Fleet, Handoff
from kvrelay.policy.cost import Flags, Prompt, Readers, Ways, Writers, uncached_tokens
from kvrelay.policy.fit import Floats
from kvrelay.policy.perf import beside_a_step, prefill_seconds
from kvrelay.policy.route import Decision, choose
from kvrelay.types import PromptNames, Role, Value, WorkerInfo

MAX_SPLIT_PROMPTS = 64
"""A request with more prompts than this is not split: each would be a connection of its own."""


class Pick(Value, frozen=True, kw_only=True):
    """A choice, with what it takes to act on it."""

    decision: Decision
    decode: WorkerInfo
    prefill: WorkerInfo | None
    """None: the decode worker computes the prompt."""
    handoff: Handoff | None
    kv_tokens: int
    """KV that the decode worker will hold of the request."""
    share: float = 1.0
    """Of all its prompts' tokens, those that the decision is about."""

    def decode_reservation(self, ask: Ask) -> DecodeReservation:
        own = dict(self.decision.chosen.items)["prefill"] / self.share if self.prefill is None else 0.0
        return DecodeReservation(
            worker=self.decode.name,
            key=ask.facts.request_id,
            sequences=ask.sequences,
            kv_tokens=self.kv_tokens,
            prefill_s=own,
        )


class Chooser:
    """Read-only view of fleet, loads, holdings and experience."""

    def __init__(
        self,
        fleet: Fleet,
        loads: Loads,
        holdings: Holdings,
        experience: Experience,
        breakers: Breakers,
        reach: Reach,
        *,
        local_prefill: bool,
    ) -> None:
        self._fleet = fleet
        self._loads = loads
        self._holdings = holdings
        self._reach = reach
        self._experience = experience
        self._local_prefill = local_prefill
        self._breakers = breakers
        self._grounds = Grounds(fleet, loads.links, breakers)

    def __repr__(self) -> str:
        return f"<Chooser over {self._fleet!r}>"

    def ground(self, model: str, now: float) -> Ground:
        """All usable workers of ``model``."""
        return self._grounds.of(model, now)

    # ------------------------------------------------------------ choices

    def begin(self, ask: Ask, ground: Ground, now: float) -> Pick | None:
        """Where the longest prompt of a new request is computed, and where its answers are written."""
        facts = ask.facts
        split = not self.why_whole(ask)
        longest = longest_prompt(ask)
        names = facts.page_names[longest] if facts.page_names else {}
        tokens = facts.prompt_tokens[longest] if split else sum(facts.prompt_tokens)
        prompt = self._prompt(ask, tokens)
        # Who is probed computes the prompt too: a P would have D asked only when it is done.
        well = np.logical_not(np.array(self._breakers.are_open(ground.writing.names), dtype=bool))
        pairs = ground.pairs & well if split else np.zeros_like(ground.pairs)
        # Of several prompts some would be local and some not; until hand-offs are known, roles decide.
        own = self._local_prefill and self._experience.knows_handoffs and len(facts.prompt_tokens) == 1
        own_too = np.logical_or(~pairs.any(axis=0), own)
        may_wait = len(facts.prompt_tokens) == 1 or split
        pick = self._choose(prompt, names, ground, pairs, own_too, now, may_wait=may_wait)
        share = tokens / sum(facts.prompt_tokens) if tokens else 1.0
        return pick if pick is None or share == 1.0 else msgspec.structs.replace(pick, share=share)

    def prefill(
        self, ask: Ask, leg: PromptLeg, decode: WorkerInfo, now: float, *, may_wait: bool, shun: str | None = None
    ) -> Pick | None:
        """The best P for this prompt that can hand over to ``decode``, was not tried and is not the one to ``shun``.

        ``may_wait``: for a prefix that another worker computes, or a store is to push.
        """
        ground = self._grounds.of(ask.facts.model, now)
        tried = leg.tried | {shun}
        fresh = np.array([worker.name not in tried for worker in ground.readers], dtype=bool)
        there = np.array([worker.name == decode.name for worker in ground.writers], dtype=bool)
        pairs = ground.pairs & fresh[:, np.newaxis] & there
        prompt = self._prompt(ask, leg.prompt_tokens)
        return self._choose(prompt, leg.names, ground, pairs, np.zeros_like(there), now, may_wait=may_wait)

    def decode(self, ask: Ask, tried: Collection[str], now: float) -> Pick | None:
        """The best D that was not tried yet, when the first one failed."""
        ground = self._grounds.of(ask.facts.model, now)
        fresh = np.array([worker.name not in tried for worker in ground.writers], dtype=bool)
        prompt = self._prompt(ask, ask.facts.prompt_tokens[longest_prompt(ask)])
        names = ask.facts.page_names[longest_prompt(ask)] if ask.facts.page_names else {}
        return self._choose(prompt, names, ground, np.zeros_like(ground.pairs), fresh, now, may_wait=False)

    def resume(self, ask: Ask, tried: Collection[str], now: float) -> Pick | None:
        """Where the rest of an answer is written, and its prompt computed: whatever the settings, by the sum alone.

        Several choices share nearly all of their prompts, so that one D computes them.
        """
        ground = self._grounds.of(ask.facts.model, now)
        prompt = self._prompt(ask, ask.facts.prompt_tokens[longest_prompt(ask)])
        names = ask.facts.page_names[longest_prompt(ask)] if ask.facts.page_names else {}
        writers = np.array([worker.name not in tried for worker in ground.writers], dtype=bool)
        readers = np.array([worker.name not in tried for worker in ground.readers], dtype=bool)
        single = len(ask.facts.prompt_tokens) == 1
        pairs = ground.pairs & readers[:, np.newaxis] & writers & single
        return self._choose(prompt, names, ground, pairs, writers, now, may_wait=single)

    def _prompt(self, ask: Ask, tokens: int) -> Prompt:
        facts = ask.facts
        return Prompt(
            tokens=tokens,
            sequences=ask.sequences,
            output_tokens=self._experience.output_tokens(facts.model, facts.max_tokens / ask.sequences),
            other_tokens=sum(facts.prompt_tokens) - tokens,
        )

    def _choose(
        self,
        prompt: Prompt,
        names: PromptNames,
        ground: Ground,
        pairs: Flags,
        own: Flags,
        now: float,
        *,
        may_wait: bool,
    ) -> Pick | None:
        depths = self._holdings.depths(names)
        waited_for = names if may_wait else {}
        readers = self._readers(ground.reading, depths, waited_for, prompt, now)
        own_readers = self._readers(ground.writing, depths, waited_for if own.any() else {}, prompt, now)
        writers = self._writers(ground.writing, own_readers, own, prompt)
        matrices = self._loads.links.between(ground.reading.stores, ground.writing.stores)
        stored = stored_tokens(ground.reading, ground.writing, depths, own_readers.sources)
        decision = choose(prompt, readers, writers, Ways(pairs, *matrices, stored))
        if decision is None:
            return None
        decode = next(worker for worker in ground.writers if worker.name == decision.chosen.decode)
        prefill = next((worker for worker in ground.readers if worker.name == decision.chosen.prefill), None)
        handoff = self._fleet.pair(prefill, decode, now) if prefill is not None else None
        guesses = self._experience.guesses((prefill or decode).name, decode.name)
        return Pick(
            decision=msgspec.structs.replace(decision, guesses=guesses) if guesses else decision,
            decode=decode,
            prefill=prefill,
            handoff=handoff if isinstance(handoff, Handoff) else None,
            kv_tokens=round(prompt.held_tokens),
        )

    # ------------------------------------------------------------ why

    def why_whole(self, ask: Ask) -> str:
        """Why the request must not be split, as a word for a metric label; empty when it may be."""
        if ask.local_reason:
            return ask.local_reason
        return "many_prompts" if len(ask.facts.prompt_tokens) > MAX_SPLIT_PROMPTS else ""

    def why_local(self, ask: Ask, decode: WorkerInfo, ground: Ground) -> str:
        """Why ``decode`` computes the request's prompts itself, as a word for a metric label."""
        if reason := self.why_whole(ask):
            return reason
        if ground.pairs[:, ground.writers.index(decode)].any():
            return "probe" if self._breakers.are_open([decode.name])[0] else "cheaper"
        if decode.role is Role.DECODE:
            return "no_pair" if ground.readers else "no_prefill"
        return "no_pair" if any(not worker.role.decodes for worker in ground.readers) else "colocated"

    # ------------------------------------------------------------ vectors

    def _readers(self, place: Place, depths: Depths, waited_for: PromptNames, prompt: Prompt, now: float) -> Readers:
        loads, names, sources = self._loads, place.names, self._holdings.sources(place, depths)
        if waited_for:
            sources = self._reach.added(sources, place, waited_for, depths, prompt.tokens, now)
        rates = self._experience.rates(names)[Law.PREFILL.value]
        new = np.maximum(1.0, prompt.tokens - sources.tokens.max(axis=0, initial=0.0))
        own_s = prefill_seconds(rates, new, prompt.tokens - new)
        own_s = np.where(np.isfinite(place.passing_tokens), own_s, np.inf)
        # It comes in the middle of a step, on average.
        step_s = prefill_seconds(rates, place.passing_tokens, np.zeros(1)) / 2
        waits = zip(names, own_s.tolist(), step_s.tolist(), strict=True)
        return Readers(
            names=names,
            rates=rates,
            queue_s=_row([loads.wait_s(name, now, own, step) + loads.held_s(name, own) for name, own, step in waits]),
            sources=sources,
            token_bytes=place.token_bytes,
            last_chosen=np.array([loads.last_chosen(name) for name in names], dtype=np.int64),
        )

    def _writers(self, place: Place, readers: Readers, computes: Flags, prompt: Prompt) -> Writers:
        loads, rates = self._loads, self._experience.rates(readers.names)
        return Writers(
            readers=dataclasses.replace(readers, rates=beside_a_step(readers.rates, rates[Law.STEP.value])),
            step_rates=rates[Law.STEP.value],
            answer_s=rates[Law.ANSWER.value][0],
            sequences=_row([loads.sequences[name] for name in readers.names]),
            usual_sequences=np.maximum(1.0, _row([loads.usual_sequences(name) for name in readers.names])),
            kv_tokens=_row([loads.kv_tokens[name] for name in readers.names]),
            kv_capacity_tokens=place.kv_tokens,
            # Those that run are, on average, half way through.
            remaining_tokens=np.full(len(readers.names), prompt.output_tokens / 2),
            computes=computes,
        )

    def prefill_reservation(self, leg: PromptLeg, pick: Pick, transfer: str) -> PrefillReservation:
        """What ``pick`` promises for ``leg``."""
        assert pick.prefill is not None, "a local pick has no P leg"
        chosen = pick.decision.chosen
        page = pick.prefill.engine.fingerprint.format
        return PrefillReservation(
            worker=pick.prefill.name,
            key=transfer,
            tokens=uncached_tokens(leg.prompt_tokens, chosen.cached_tokens),
            seconds=dict(chosen.items)["prefill"],
            source=pick.prefill.store,
            target=pick.decode.store,
            bytes=chosen.moved_tokens * page.layers * page.token_layer_bytes,
        )


def longest_prompt(ask: Ask) -> int:
    """Position of the longest prompt: it decides where the answers are written."""
    lengths = ask.facts.prompt_tokens
    return max(range(len(lengths)), key=lengths.__getitem__)


def _row(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)
