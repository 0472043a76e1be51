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
from kvrelay.fleet.holdings import Depths, Holdings, stored_tokens
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.prefix_finder import PrefixCandidates, PrefixFinder, PrefixOffers
from kvrelay.fleet.prompt_set import PromptSet, PromptSetOffers
from kvrelay.fleet.rates import Law
from kvrelay.fleet.topology import Topologies, Topology, WorkerColumns
from kvrelay.fleet.workers import Fleet, Handoff
from kvrelay.policy.cost import DecodeColumns, Hints, PrefillColumns, Prompt, Ways
from kvrelay.policy.perf import Rates, prefill_seconds
from kvrelay.policy.route import choose
from kvrelay.policy.whole import WholeReason
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
        finder: PrefixFinder,
        *,
        local_prefill: bool,
    ) -> None:
        self._fleet = fleet
        self._loads = loads
        self._holdings = holdings
        self._finder = finder
        self._experience = experience
        self._local_prefill = local_prefill
        self._breakers = breakers
        self._topologies = Topologies(fleet, loads.links, breakers)

    def __repr__(self) -> str:
        return f"<Chooser over {self._fleet!r}>"

    def topology(self, model: str, now: float) -> Topology:
        """All usable workers of ``model``."""
        return self._topologies.of(model, now)

    def keep_only(self, models: Sequence[str]) -> None:
        """Forget models that nobody serves any more."""
        self._topologies.keep_only(models)

    # ------------------------------------------------------------ choices

    def begin(self, ask: Ask, topology: Topology, now: float, at_most: float = math.inf) -> Pick | None:
        """The workers for a new request: where its longest prompt is computed and its answers are decoded. ``at_most``:
        longest context of a decode worker that may be chosen."""
        facts = ask.facts
        split = not self.why_whole(ask)
        longest = longest_prompt(ask)
        names = facts.page_names[longest] if facts.page_names else {}
        tokens = facts.prompt_tokens[longest] if split else sum(facts.prompt_tokens)
        prompt = self._prompt(ask, tokens)
        # A decode worker that is probed computes the prompt too: with a P it would be asked only when P is done.
        probed = [at for at, is_open in enumerate(self._breakers.are_open(topology.decode_columns.names)) if is_open]
        prefills = topology.prefill_columns.taking(tokens + 1) if split else ()  # P writes a token
        decodes = topology.decode_columns.taking(ask.context_tokens, at_most)
        # Of several prompts some would be local and some not; until hand-offs are known, roles decide.
        own = self._local_prefill and self._experience.knows_handoffs and len(facts.prompt_tokens) == 1
        open_to = Open(
            prefills=prefills,
            decodes=[at for at in decodes if at not in probed],
            computing=decodes
            if own or not split
            else [at for at in sorted({*topology.alone_but_for(prefills), *probed}) if at in decodes],
        )
        may_wait = len(facts.prompt_tokens) == 1 or split
        pick = self._choose(prompt, names, topology, open_to, now, may_wait=may_wait)
        share = tokens / sum(facts.prompt_tokens) if tokens else 1.0
        return pick if pick is None or share == 1.0 else msgspec.structs.replace(pick, share=share)

    def prefill(
        self, ask: Ask, leg: PromptLeg, decode: WorkerInfo, now: float, *, may_wait: bool, shun: str | None = None
    ) -> Pick | None:
        """The best P for this prompt that can hand over to ``decode``, was not tried and is not the one to ``shun``.

        ``may_wait``: for a prefix that another worker computes, or a store is to push.
        """
        topology = self._topologies.of(ask.facts.model, now)
        open_to = Open(
            prefills=_others(topology.prefill_columns, {*leg.tried, shun}, leg.prompt_tokens + 1),
            decodes=[at for at, name in enumerate(topology.decode_columns.names) if name == decode.name],
            computing=(),
        )
        prompt = self._prompt(ask, leg.prompt_tokens)
        return self._choose(prompt, leg.names, topology, open_to, now, may_wait=may_wait)

    def decode(self, ask: Ask, tried: Collection[str], now: float) -> Pick | None:
        """The best D that was not tried yet, when the first one failed."""
        topology = self._topologies.of(ask.facts.model, now)
        open_to = Open(prefills=(), decodes=(), computing=_others(topology.decode_columns, tried, ask.context_tokens))
        return self._choose_for_all(ask, topology, open_to, now, may_wait=False)

    def resume(self, ask: Ask, tried: Collection[str], now: float) -> Pick | None:
        """Where the rest of an answer is written, and its prompt computed: whatever the settings, by the sum alone.

        Several choices share nearly all of their prompts, so that one D computes them.
        """
        topology = self._topologies.of(ask.facts.model, now)
        single, decodes = len(ask.facts.prompt_tokens) == 1, _others(topology.decode_columns, tried, ask.context_tokens)
        prefills = _others(topology.prefill_columns, tried, ask.facts.prompt_tokens[0] + 1) if single else ()
        open_to = Open(prefills=prefills, decodes=decodes, computing=decodes)
        return self._choose_for_all(ask, topology, open_to, now, may_wait=single)

    def _choose_for_all(
        self, ask: Ask, topology: Topology, open_to: Open, now: float, *, may_wait: bool
    ) -> Pick | None:
        """One worker computes all prompts of the request."""
        every = PromptSet.of(ask.facts, topology.namings, self._holdings)
        prompt = self._prompt(ask, every.tokens)
        return self._choose(prompt, every.names, topology, open_to, now, may_wait=may_wait, every=every)

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
        topology: Topology,
        open_to: Open,
        now: float,
        *,
        may_wait: bool,
        every: PromptSet | None = None,
    ) -> Pick | None:
        """``names``: pages of the prompt; where one worker computes ``every`` prompt, those of the longest."""
        depths = self._holdings.depths(names)
        found = self._finder.look(names, depths, now, may_wait=may_wait)
        prefills = self._prefills(topology.prefill_columns, found, prompt, now, every)
        own_prefills = self._prefills(topology.decode_columns, found, prompt, now, every)
        decodes = self._decodes(topology.decode_columns, own_prefills, open_to.computing, prompt)
        decision = choose(prompt, prefills, decodes, self._ways(topology, open_to, depths))
        if decision is None:
            return None
        decode = next(worker for worker in topology.decode_workers if worker.name == decision.chosen.decode)
        prefill = next((worker for worker in topology.prefill_workers if worker.name == decision.chosen.prefill), None)
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
        return WholeReason.MANY_PROMPTS if len(ask.facts.prompt_tokens) > MAX_SPLIT_PROMPTS else ""

    def why_local(self, ask: Ask, decode: WorkerInfo, topology: Topology) -> str:
        """Why ``decode`` computes the request's prompts itself, as a word for a metric label."""
        if reason := self.why_whole(ask):
            return reason
        at = topology.decode_workers.index(decode)
        if at not in topology.alone:
            if self._breakers.are_open([decode.name])[0]:
                return "probe"
            prefills = topology.prefill_columns.taking(max(ask.facts.prompt_tokens) + 1)
            return "long_prompt" if at in topology.alone_but_for(prefills) else "cheaper"
        if decode.role is Role.DECODE:
            return "no_pair" if topology.prefill_workers else "no_prefill"
        return "no_pair" if any(not worker.role.decodes for worker in topology.prefill_workers) else "colocated"

    # ------------------------------------------------------------ columns

    def _offers(
        self, columns: WorkerColumns, found: PrefixCandidates, tokens: int, now: float, every: PromptSet | None
    ) -> PrefixOffers | PromptSetOffers:
        if every is None or not every.others:
            return self._finder.offers(columns, found, tokens, now)
        first = self._finder.offers(columns, found, every.first_tokens, now)
        return PromptSetOffers(first, every.at_hand(columns))

    def _prefills(
        self, columns: WorkerColumns, found: PrefixCandidates, prompt: Prompt, now: float, every: PromptSet | None
    ) -> PrefillColumns:
        names, offers = columns.names, self._offers(columns, found, prompt.tokens, now, every)
        rates, hints = self._experience.rates(Law.PREFILL, names), offers.hints()
        queue_s, passed = self._queues(columns, rates, hints, prompt.tokens, now)
        return PrefillColumns(
            names=names,
            rates=rates,
            queue_s=queue_s,
            passed=passed,
            offers=offers,
            hints=hints,
            token_bytes=columns.token_bytes,
            last_chosen=self._loads.last_chosen(names),
        )

    def _queues(
        self, columns: WorkerColumns, rates: Sequence[Rates], hints: Hints, asked: int, now: float
    ) -> tuple[list[float], list[int]]:
        """Waits, and how many prompts stand back, by worker."""
        loads, queues_s, passed = self._loads, [0.0] * len(columns.names), [0] * len(columns.names)
        busy, cached = loads.busy(), hints.most_tokens() if any(columns.lets_pass) else ()
        for at, name in enumerate(columns.names):
            if name not in busy:
                continue
            own_s = math.inf
            if columns.lets_pass[at]:
                new = max(1.0, asked - cached[at])
                own_s = prefill_seconds(rates[at], new, asked - new)
                passed[at] = loads.passed(name, own_s, now)
            queues_s[at] = loads.wait_s(name, now, own_s) + loads.held_s(name, own_s)
        return queues_s, passed

    def _decodes(
        self, columns: WorkerColumns, prefills: PrefillColumns, computes: Sequence[int], prompt: Prompt
    ) -> DecodeColumns:
        loads, names = self._loads, columns.names
        answers = self._experience.rates(Law.ANSWER, names)
        running = [loads.running.get(name, 0) for name in names]
        return DecodeColumns(
            as_prefills=msgspec.structs.replace(prefills, rates=prefills.rates.beside(answers)),
            step_rates=self._experience.rates(Law.STEP, names),
            answer_s=answers.starts(),
            sequences=[loads.sequences.get(name, 0) for name in names],
            running=list(map(max, repeat(1.0), running, loads.usually_running(names))),
            kv_tokens=[loads.kv_tokens.get(name, 0) for name in names],
            kv_capacity_tokens=columns.kv_tokens,
            # Those that run are, on average, half way through.
            remaining_tokens=prompt.output_tokens / 2,
            computes=computes,
            chunk_tokens=[
                tokens if many else math.inf for many, tokens in zip(running, columns.chunk_tokens, strict=True)
            ],
        )

    def _ways(self, topology: Topology, open_to: Open, depths: Depths) -> Ways:
        links, prefills, decodes = self._loads.links, topology.prefill_columns, topology.decode_columns
        stores = prefills.stores
        tables = links.tables
        return Ways(
            prefills=open_to.prefills,
            decodes=open_to.decodes,
            allowed=topology.pairs,
            sources=stores,
            targets=decodes.stores,
            latency_s=tables.latency_s,
            s_per_byte=tables.s_per_byte,
            in_flight_bytes=tables.in_flight_bytes,
            least_s=[
                min(least_s, tables.latency_s[row][row]) if near else least_s
                for row, near, least_s in zip(stores, topology.near, links.leasts_s(stores), strict=True)
            ],
            stored_tokens=stored_tokens(prefills, decodes, depths),
        )


def longest_prompt(ask: Ask) -> int:
    """Position of the longest prompt: it decides where the answers are written."""
    lengths = ask.facts.prompt_tokens
    return max(range(len(lengths)), key=lengths.__getitem__)


def _others(columns: WorkerColumns, tried: Collection[str | None], tokens: int) -> list[int]:
    """Positions of those that were not tried yet and take so many ``tokens``."""
    return [at for at in columns.taking(tokens) if columns.names[at] not in tried]
