"""A choice of workers for one request, with what it takes to act on it. It must never reserve anything itself."""

from __future__ import annotations

import math

from kvrelay.fleet.flight import Ask, PromptLeg
from kvrelay.fleet.loads import DecodeReservation, PrefillReservation
from kvrelay.fleet.topology import chunk_tokens
from kvrelay.fleet.workers import Handoff
from kvrelay.policy.cost import Item, uncached_tokens
from kvrelay.policy.route import Decision
from kvrelay.types import Engine, Value, WorkerInfo


class Pick(Value, frozen=True, kw_only=True):
    """The prefill and the decode worker of a request, and the decision that chose them."""

    decision: Decision
    decode: WorkerInfo
    prefill: WorkerInfo | None
    """None: the decode worker computes the prompt."""
    handoff: Handoff | None
    kv_tokens: int
    """KV that the decode worker will hold of the request."""
    tokens: int
    """Prompt tokens that the decision is about."""
    share: float = 1.0
    """``tokens`` as a share of the tokens of all prompts of the request."""

    @property
    def computed_on(self) -> WorkerInfo:
        """The worker that computes the prompt: the prefill worker, or the decode worker where there is none."""
        return self.prefill or self.decode

    @property
    def prefill_s(self) -> float:
        """Predicted seconds that this worker computes the prompt."""
        return dict(self.decision.chosen.items)[Item.PREFILL]

    def decode_reservation(self, ask: Ask) -> DecodeReservation:
        chosen = self.decision.chosen
        own_s = self.prefill_s if self.prefill is None else 0.0
        tokens = uncached_tokens(self.tokens, chosen.cached_tokens)
        return DecodeReservation(
            worker=self.decode.name,
            key=ask.facts.request_id,
            sequences=ask.sequences,
            kv_tokens=self.kv_tokens,
            prefill_s=own_s / self.share,
            step_s=share_of_step_s(self.decode.engine, own_s, tokens, chunk_tokens(self.decode.engine)),
        )

    def prefill_reservation(self, leg: PromptLeg, transfer: str) -> PrefillReservation:
        """What is promised to the prefill worker for ``leg``."""
        assert self.prefill is not None, "a local pick has no P leg"
        chosen, engine = self.decision.chosen, self.prefill.engine
        page = engine.fingerprint.format
        tokens, items = uncached_tokens(leg.prompt_tokens, chosen.cached_tokens), dict(chosen.items)
        return PrefillReservation(
            worker=self.prefill.name,
            key=transfer,
            tokens=tokens,
            seconds=self.prefill_s,
            due_s=items[Item.QUEUE] + items[Item.SOURCE] + self.prefill_s,
            step_s=share_of_step_s(engine, self.prefill_s, tokens, engine.max_batched_tokens),
            source=self.prefill.store,
            target=self.decode.store,
            bytes=chosen.moved_tokens * page.layers * page.token_layer_bytes,
        )


def share_of_step_s(engine: Engine, prefill_s: float, tokens: int, chunk: int) -> float:
    """Predicted time of each step that computes a ``chunk`` of ``tokens``; 0 where prompts are computed in strict
    order."""
    return prefill_s / math.ceil(tokens / chunk) if engine.lets_pass else 0.0
