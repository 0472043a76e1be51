"""Turns the fleet's state into columns and asks policy to choose. It must never change that state."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import NamedTuple

import msgspec

from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import Ask, PromptLeg
from kvrelay.fleet.ground import Ground, Grounds, Place
from kvrelay.fleet.holdings import Depths, Holdings, stored_tokens
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.rates import Law
from kvrelay.fleet.reach import PlaceOffers, Reach, Sight
from kvrelay.fleet.together import Together, TogetherOffers
from kvrelay.fleet.workers import Fleet, Handoff
from kvrelay.policy.cost import DecodeColumns, Hints, PrefillColumns, Prompt, Ways
from kvrelay.policy.perf import Rates, prefill_seconds
from kvrelay.policy.route import choose
from kvrelay.types import PromptNames, Role, WorkerInfo

MAX_SPLIT_PROMPTS = 64
"""A request with more prompts than this is not split: each would be a connection of its own."""


class Open(NamedTuple):
    """Positions of workers that a choice may fall on."""

    prefills: Sequence[int]
    decodes: Sequence[int]
    """For a prompt that another worker computes."""
    computing: Sequence[int]
    """Decode workers that may compute it themselves."""


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

    def keep_only(self, models: Sequence[str]) -> None:
        """Forget models that nobody serves any more."""
        self._grounds.keep_only(models)

    # ------------------------------------------------------------ choices

    def begin(self, ask: Ask, ground: Ground, now: float, at_most: float = math.inf) -> Pick | None:
        """Where the longest prompt of a new request is computed, and where its answers are written: by nobody whose
        context is longer than ``at_most``."""
        facts = ask.facts
        split = not self.why_whole(ask)
        longest = longest_prompt(ask)
        names = facts.page_names[longest] if facts.page_names else {}
        tokens = facts.prompt_tokens[longest] if split else sum(facts.prompt_tokens)
        prompt = self._prompt(ask, tokens)
        # Who is probed computes the prompt too: a P would have D asked only when it is done.
        probed = [at for at, is_open in enumerate(self._breakers.are_open(ground.decode_columns.names)) if is_open]
        prefills = ground.prefill_columns.taking(tokens + 1) if split else ()  # P writes a token
        decodes = ground.decode_columns.taking(ask.context_tokens, at_most)
        # Of several prompts some would be local and some not; until hand-offs are known, roles decide.
        own = self._local_prefill and self._experience.knows_handoffs and len(facts.prompt_tokens) == 1
        open_to = Open(
            prefills=prefills,
            decodes=[at for at in decodes if at not in probed],
            computing=decodes
            if own or not split
            else [at for at in sorted({*ground.alone_but_for(prefills), *probed}) if at in decodes],
        )
        may_wait = len(facts.prompt_tokens) == 1 or split
        pick = self._choose(prompt, names, ground, open_to, now, may_wait=may_wait)
        share = tokens / sum(facts.prompt_tokens) if tokens else 1.0
        return pick if pick is None or share == 1.0 else msgspec.structs.replace(pick, share=share)

    def prefill(
        self, ask: Ask, leg: PromptLeg, decode: WorkerInfo, now: float, *, may_wait: bool, shun: str | None = None
    ) -> Pick | None:
        """The best P for this prompt that can hand over to ``decode``, was not tried and is not the one to ``shun``.

        ``may_wait``: for a prefix that another worker computes, or a store is to push.
        """
        ground = self._grounds.of(ask.facts.model, now)
        open_to = Open(
            prefills=_others(ground.prefill_columns, {*leg.tried, shun}, leg.prompt_tokens + 1),
            decodes=[at for at, name in enumerate(ground.decode_columns.names) if name == decode.name],
            computing=(),
        )
        prompt = self._prompt(ask, leg.prompt_tokens)
        return self._choose(prompt, leg.names, ground, open_to, now, may_wait=may_wait)

    def decode(self, ask: Ask, tried: Collection[str], now: float) -> Pick | None:
        """The best D that was not tried yet, when the first one failed."""
        ground = self._grounds.of(ask.facts.model, now)
        open_to = Open(prefills=(), decodes=(), computing=_others(ground.decode_columns, tried, ask.context_tokens))
        return self._choose_for_all(ask, ground, open_to, now, may_wait=False)

    def resume(self, ask: Ask, tried: Collection[str], now: float) -> Pick | None:
        """Where the rest of an answer is written, and its prompt computed: whatever the settings, by the sum alone.

        Several choices share nearly all of their prompts, so that one D computes them.
        """
        ground = self._grounds.of(ask.facts.model, now)
        single, decodes = len(ask.facts.prompt_tokens) == 1, _others(ground.decode_columns, tried, ask.context_tokens)
        prefills = _others(ground.prefill_columns, tried, ask.facts.prompt_tokens[0] + 1) if single else ()
        open_to = Open(prefills=prefills, decodes=decodes, computing=decodes)
        return self._choose_for_all(ask, ground, open_to, now, may_wait=single)

    def _choose_for_all(self, ask: Ask, ground: Ground, open_to: Open, now: float, *, may_wait: bool) -> Pick | None:
        """One worker computes all prompts of the request."""
        together = Together.of(ask.facts, ground.namings, self._holdings)
        prompt = self._prompt(ask, together.tokens)
        return self._choose(prompt, together.names, ground, open_to, now, may_wait=may_wait, together=together)

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
        open_to: Open,
        now: float,
        *,
        may_wait: bool,
        together: Together | None = None,
    ) -> Pick | None:
        """``names``: of the prompt; of several that are computed ``together``, those of the longest."""
        depths = self._holdings.depths(names)
        sight = self._reach.look(names, depths, now, may_wait=may_wait)
        prefills = self._prefills(ground.prefill_columns, sight, prompt, now, together)
        own_prefills = self._prefills(ground.decode_columns, sight, prompt, now, together)
        decodes = self._decodes(ground.decode_columns, own_prefills, open_to.computing, prompt)
        decision = choose(prompt, prefills, decodes, self._ways(ground, open_to, depths))
        if decision is None:
            return None
        decode = next(worker for worker in ground.decode_workers if worker.name == decision.chosen.decode)
        prefill = next((worker for worker in ground.prefill_workers if worker.name == decision.chosen.prefill), None)
        handoff = self._fleet.pair(prefill, decode, now) if prefill is not None else None
        guesses = self._experience.guesses((prefill or decode).name, decode.name)
        return Pick(
            decision=msgspec.structs.replace(decision, guesses=guesses) if guesses else decision,
            decode=decode,
            prefill=prefill,
            handoff=handoff if isinstance(handoff, Handoff) else None,
            kv_tokens=round(prompt.held_tokens),
            tokens=prompt.tokens,
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
        at = ground.decode_workers.index(decode)
        if at not in ground.alone:
            if self._breakers.are_open([decode.name])[0]:
                return "probe"
            prefills = ground.prefill_columns.taking(max(ask.facts.prompt_tokens) + 1)
            return "long_prompt" if at in ground.alone_but_for(prefills) else "cheaper"
        if decode.role is Role.DECODE:
            return "no_pair" if ground.prefill_workers else "no_prefill"
        return "no_pair" if any(not worker.role.decodes for worker in ground.prefill_workers) else "colocated"

    # ------------------------------------------------------------ columns

    def _offers(
        self, place: Place, sight: Sight, tokens: int, now: float, together: Together | None
    ) -> PlaceOffers | TogetherOffers:
        if together is None or not together.others:
            return self._reach.offers(place, sight, tokens, now)
        return TogetherOffers(self._reach.offers(place, sight, together.first_tokens, now), together.at_hand(place))

    def _prefills(
        self, place: Place, sight: Sight, prompt: Prompt, now: float, together: Together | None
    ) -> PrefillColumns:
        names, offers = place.names, self._offers(place, sight, prompt.tokens, now, together)
        rates, hints = self._experience.rates(Law.PREFILL, names), offers.hints()
        queue_s, passed = self._queues(place, rates, hints, prompt.tokens, now)
        return PrefillColumns(
            names=names,
            rates=rates,
            queue_s=queue_s,
            passed=passed,
            offers=offers,
            hints=hints,
            token_bytes=place.token_bytes,
            last_chosen=self._loads.last_chosen(names),
        )

    def _queues(
        self, place: Place, rates: Sequence[Rates], hints: Hints, asked: int, now: float
    ) -> tuple[list[float], list[int]]:
        """Waits, and how many prompts stand back, by worker."""
        loads, queues_s, passed = self._loads, [0.0] * len(place.names), [0] * len(place.names)
        busy, cached = loads.busy(), hints.most_tokens() if any(place.lets_pass) else ()
        for at, name in enumerate(place.names):
            if name not in busy:
                continue
            own_s = math.inf
            if place.lets_pass[at]:
                new = max(1.0, asked - cached[at])
                own_s = prefill_seconds(rates[at], new, asked - new)
                passed[at] = loads.passed(name, own_s, now)
            queues_s[at] = loads.wait_s(name, now, own_s) + loads.held_s(name, own_s)
        return queues_s, passed

    def _decodes(
        self, place: Place, prefills: PrefillColumns, computes: Sequence[int], prompt: Prompt
    ) -> DecodeColumns:
        loads, names = self._loads, place.names
        answers = self._experience.rates(Law.ANSWER, names)
        running = [loads.running.get(name, 0) for name in names]
        return DecodeColumns(
            as_prefills=msgspec.structs.replace(prefills, rates=prefills.rates.beside(answers)),
            step_rates=self._experience.rates(Law.STEP, names),
            answer_s=answers.starts(),
            sequences=[loads.sequences.get(name, 0) for name in names],
            running=list(map(max, repeat(1.0), running, loads.usually_running(names))),
            kv_tokens=[loads.kv_tokens.get(name, 0) for name in names],
            kv_capacity_tokens=place.kv_tokens,
            # Those that run are, on average, half way through.
            remaining_tokens=prompt.output_tokens / 2,
            computes=computes,
            chunk_tokens=[
                tokens if many else math.inf for many, tokens in zip(running, place.chunk_tokens, strict=True)
            ],
        )

    def _ways(self, ground: Ground, open_to: Open, depths: Depths) -> Ways:
        links, p_columns, d_columns = self._loads.links, ground.prefill_columns, ground.decode_columns
        tables = links.tables
        return Ways(
            prefills=open_to.prefills,
            decodes=open_to.decodes,
            allowed=ground.pairs,
            sources=p_columns.stores,
            targets=d_columns.stores,
            latency_s=tables.latency_s,
            s_per_byte=tables.s_per_byte,
            in_flight_bytes=tables.in_flight_bytes,
            least_s=[
                min(least_s, tables.latency_s[row][row]) if near else least_s
                for row, near, least_s in zip(
                    p_columns.stores, ground.near, links.leasts_s(p_columns.stores), strict=True
                )
            ],
            stored_tokens=stored_tokens(p_columns, d_columns, depths),
        )


def longest_prompt(ask: Ask) -> int:
    """Position of the longest prompt: it decides where the answers are written."""
    lengths = ask.facts.prompt_tokens
    return max(range(len(lengths)), key=lengths.__getitem__)


def _others(place: Place, tried: Collection[str | None], tokens: int) -> list[int]:
    """Positions of those that were not tried yet and take so many ``tokens``."""
    return [at for at in place.taking(tokens) if place.names[at] not in tried]
