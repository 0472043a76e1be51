"""Turns the fleet's state into candidates and asks policy to choose. It must never change that state."""

from __future__ import annotations

from collections.abc import Collection

from kvrelay.fleet.flight import Ask, PromptLeg
from kvrelay.fleet.index import PageIndex
from kvrelay.fleet.loads import DecodeReservation, Loads, PrefillReservation
from kvrelay.fleet.workers import Fleet, Handoff
from kvrelay.policy.cost import DecodeLoad, PrefillLoad, uncached_tokens
from kvrelay.policy.route import Choice, choose_decode, choose_prefill
from kvrelay.types import Role, Value, WorkerInfo

MAX_SPLIT_PROMPTS = 64
"""A request with more prompts than this is not split: each would be a connection of its own."""


class PrefillPick(Value, frozen=True, kw_only=True):
    """The P chosen for one prompt, and what it will be asked to compute."""

    worker: WorkerInfo
    handoff: Handoff
    reservation: PrefillReservation
    choice: Choice


class DecodePick(Value, frozen=True, kw_only=True):
    """The D chosen for a request."""

    worker: WorkerInfo
    reservation: DecodeReservation
    choice: Choice


class Chooser:
    """Read-only view of fleet, loads and index."""

    def __init__(self, fleet: Fleet, loads: Loads, index: PageIndex) -> None:
        self._fleet = fleet
        self._loads = loads
        self._index = index

    def __repr__(self) -> str:
        return f"<Chooser over {self._fleet!r}>"

    def decoders(self, model: str, now: float) -> list[WorkerInfo]:
        return [worker for worker in self._fleet.serving(model, now) if worker.role.decodes]

    def prefillers(self, model: str, now: float) -> list[WorkerInfo]:
        return [worker for worker in self._fleet.serving(model, now) if worker.role.prefills]

    def decode(self, ask: Ask, tried: Collection[str], now: float) -> DecodePick | None:
        """The best D that was not tried yet."""
        workers = {worker.name: worker for worker in self.decoders(ask.facts.model, now) if worker.name not in tried}
        kv_tokens = sum(ask.facts.prompt_tokens) + ask.facts.max_tokens
        choice = choose_decode(map(self._decode_load, workers.values()), ask.sequences, kv_tokens)
        if choice is None:
            return None
        reservation = DecodeReservation(worker=choice.worker, sequences=ask.sequences, kv_tokens=kv_tokens)
        return DecodePick(worker=workers[choice.worker], reservation=reservation, choice=choice)

    def prefill(self, leg: PromptLeg, decode: WorkerInfo, now: float) -> PrefillPick | None:
        """The best P for this prompt that can hand over to ``decode`` and was not tried yet."""
        pairs = {worker.name: (worker, handoff) for worker, handoff in self._pairs(decode, now)}
        loads = {name: self._prefill_load(pair[0], leg) for name, pair in pairs.items() if name not in leg.tried}
        choice = choose_prefill(loads.values(), leg.prompt_tokens)
        if choice is None:
            return None
        tokens = uncached_tokens(leg.prompt_tokens, loads[choice.worker].cached_tokens)
        worker, handoff = pairs[choice.worker]
        reservation = PrefillReservation(worker=choice.worker, tokens=tokens)
        return PrefillPick(worker=worker, handoff=handoff, reservation=reservation, choice=choice)

    def why_local(self, ask: Ask, decode: WorkerInfo, now: float) -> str:
        """Why the request is served by ``decode`` alone, as a word for a metric label; empty when it can be split."""
        if ask.local_reason:
            return ask.local_reason
        if len(ask.facts.prompt_tokens) > MAX_SPLIT_PROMPTS:
            return "many_prompts"
        if self._pairs(decode, now):
            return ""
        prefillers = self.prefillers(decode.model, now)
        if decode.role is Role.DECODE:
            return "no_pair" if prefillers else "no_prefill"
        return "no_pair" if any(not worker.role.decodes for worker in prefillers) else "colocated"

    def _pairs(self, decode: WorkerInfo, now: float) -> list[tuple[WorkerInfo, Handoff]]:
        tried = [(worker, self._fleet.pair(worker, decode, now)) for worker in self.prefillers(decode.model, now)]
        return [(worker, pair) for worker, pair in tried if isinstance(pair, Handoff)]

    def _prefill_load(self, worker: WorkerInfo, leg: PromptLeg) -> PrefillLoad:
        pages = self._index.prefix(worker.name, worker.incarnation, leg.names)
        return PrefillLoad(
            worker=worker.name,
            queued_tokens=self._loads.queued_tokens[worker.name],
            cached_tokens=pages * worker.engine.fingerprint.format.page_tokens,
            last_chosen=self._loads.last_chosen(worker.name),
        )

    def _decode_load(self, worker: WorkerInfo) -> DecodeLoad:
        return DecodeLoad(
            worker=worker.name,
            sequences=self._loads.sequences[worker.name],
            kv_tokens=self._loads.kv_tokens[worker.name],
            kv_capacity_tokens=worker.engine.kv_tokens,
            last_chosen=self._loads.last_chosen(worker.name),
        )
