"""One request in flight: its P legs, its D leg, and what it has reserved. It must never decide; the brain does."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.fleet.ledger import Timeline
from kvrelay.fleet.loads import DecodeReservation, PrefillReservation
from kvrelay.policy.admit import Slo
from kvrelay.policy.crash_history import CrashHistory
from kvrelay.policy.loss import LossReason
from kvrelay.policy.recover import Losses, Manner
from kvrelay.policy.route import Path
from kvrelay.protocol.feed import PushOrder
from kvrelay.types import PromptNames, RequestFacts, Value, WorkerInfo


class Ask(Value, frozen=True, kw_only=True):
    """A request as the gateway hands it in."""

    facts: RequestFacts
    sequences: int = 1
    """Answers to write: choices times prompts."""
    local_reason: str = ""
    """Why this request must not be split (a word for a metric label); empty when it may be."""
    tenant: str = ""
    received_s: float
    """When the request came in, on the clock of ``now``."""
    tokenised_s: float | None = None
    slo: Slo = Slo()
    in_one_piece: bool = False
    """Nothing is heard of its answer before all of it is written."""
    context_tokens: int = 0
    """Longest prompt and the answer that the client demands to it: a D is to take so many."""


class Rest(Value, frozen=True, kw_only=True):
    """What is left to write of an answer that loses its decode worker."""

    ask: Ask | None
    """None: it cannot be asked for."""
    tokens: int
    """Written before, of all choices."""
    manner: Manner = Manner.CONTINUE
    replay_tokens: int = 0
    """To be written again, one after the other."""


class PrefillOrder(Value, frozen=True, kw_only=True):
    """Send prompt ``index`` to this P."""

    index: int
    worker: str
    url: str
    transfer: str
    push_to: str | None


class DecodeOrder(Value, frozen=True, kw_only=True):
    """Send the request to this D; ``transfers`` may still bring pages there."""

    worker: str
    url: str
    transfers: tuple[str, ...]
    home: str | None = None
    """Store of P's node, when D's is another: the next turn's prefill looks there for what D generates."""
    page_dtypes: tuple[str, ...] = ()
    """KV types of the pages that D is to convert; empty: they are of its own."""
    context_tokens: int
    """Most tokens of a prompt and its answer that D takes."""


class Plan(Value, frozen=True, kw_only=True):
    """What was chosen and reserved for a request."""

    path: Path
    local_reason: str
    prefills: tuple[PrefillOrder, ...]
    pulls: tuple[PullPages, ...] = ()
    held: bool = False
    """D computes the prompt itself and waits for a prefix: a ``DispatchDecode`` will come. Otherwise D is asked at
    once."""


class Queued(Value, frozen=True, kw_only=True):
    """The request waits in the router, to begin or to go on; a ``Start`` or a ``Refuse`` will come."""

    request_id: str


class Start(Value, frozen=True, kw_only=True):
    """Command: the request's turn has come."""

    request_id: str
    plan: Plan


class Refuse(Value, frozen=True, kw_only=True):
    """Command: the request waited too long; ``reason`` is a sentence for its client."""

    request_id: str
    reason: str
    after_s: float


class RejectPoison(Value, frozen=True, kw_only=True):
    """Command: the request kills its workers, and no other one is to have it; ``reason`` is a sentence for its
    client."""

    request_id: str
    reason: str


class SendPrefill(Value, frozen=True, kw_only=True):
    """Command: this prompt goes to another P."""

    request_id: str
    order: PrefillOrder


class DispatchDecode(Value, frozen=True, kw_only=True):
    """Command: ask D now."""

    request_id: str


class AbandonPrefill(Value, frozen=True, kw_only=True):
    """Command: the P of this leg is gone; drop its connection and report the leg failed."""

    request_id: str
    index: int


class AbandonDecode(Value, frozen=True, kw_only=True):
    """Command: the request's D is gone; drop its connection."""

    request_id: str
    reason: LossReason = LossReason.GONE
    if_resumable: bool = False
    """The D is there and writes: only answers that can go on elsewhere leave it."""


class PullPages(Value, frozen=True, kw_only=True):
    """Command: have ``store`` push pages that this request waits for."""

    request_id: str
    store: str
    order: PushOrder


Command = Start | Refuse | RejectPoison | SendPrefill | DispatchDecode | AbandonPrefill | AbandonDecode | PullPages


class LegState(StrEnum):
    """How far one prompt's prefill is."""

    HELD = "held"
    """Its P is not asked yet: a prefix of it is to come first."""
    SENT = "sent"
    STARTED = "started"
    LAST_CHUNK = "last_chunk"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (LegState.FINISHED, LegState.FAILED)


@dataclass
class PromptLeg:
    """The prefill of one prompt, over all its attempts."""

    index: int
    prompt_tokens: int
    names: PromptNames
    state: LegState = LegState.FAILED
    holds: int = 0
    """How often it was held back."""
    transfer: str = ""
    page_dtype: str = ""
    """KV type of the pages that the chosen P writes."""
    reservation: PrefillReservation | None = None
    tried: set[str] = field(default_factory=set)
    crashes: CrashHistory = field(default_factory=CrashHistory)
    """For the deaths of its Ps."""
    sent_s: float = 0.0
    """When it was sent to the current one."""
    heard_s: float = 0.0
    """Last sign of life of the current one in what it does for this prompt."""
    worker: str = ""
    """The P of the current attempt."""
    transfer_over: bool = False
    """All pages are with D's node, or the transfer FAILED: no more come, whatever P still computes."""
    transfer_failed: bool = False
    """What has arrived of it is found by name; to wait for more is of no use."""
    cached_tokens: int | None = None
    """Cached tokens by the count in P's own answer."""
    began: bool = False
    """Some P started to compute it, so D may hold pages of it."""
    begun_s: float | None = None
    """When its P began to compute it; None as long as nobody told."""
    alone_since_s: float | None = None
    """When it was sent to a P that had nothing else to do; None when others were before it."""
    route: tuple[str, str] | None = None
    """Stores of P and of D."""

    @property
    def ready(self) -> bool:
        """Nothing is gained by holding D back for this leg any longer."""
        return self.transfer_over or self.state in (LegState.LAST_CHUNK, LegState.FINISHED, LegState.FAILED)

    @property
    def awaits_pages(self) -> bool:
        """Its pages are computed and not all with D's node."""
        return self.state is LegState.FINISHED and not self.transfer_over

    def send(self, reservation: PrefillReservation, now: float) -> None:
        """A new attempt begins."""
        self.sent_s = self.heard_s = now
        self.transfer, self.reservation, self.begun_s = reservation.key, reservation, None
        self.route, self.worker = (reservation.source, reservation.target), reservation.worker
        self.tried.add(reservation.worker)
        self.state, self.transfer_over, self.transfer_failed = LegState.SENT, False, False

    def reached(self, state: LegState, now: float) -> None:
        """Milestones may be late or repeated; a leg never goes back."""
        if state is LegState.STARTED and self.begun_s is None:
            self.begun_s = now
        order = list(LegState)
        if not self.state.over and order.index(state) > order.index(self.state):
            self.state = state
        self.began = True


@dataclass
class Flight:
    """State of one request between the brain's ``begin`` and ``finish``."""

    ask: Ask
    timeline: Timeline
    decode: DecodeReservation
    aimed_at: WorkerInfo
    """The D that was chosen first: transfers bring pages to its store."""
    heard_s: float
    """Last sign of life of a P leg."""
    path: Path = Path.LOCAL
    legs: list[PromptLeg] = field(default_factory=list)
    tried_decode: dict[str, str] = field(default_factory=dict)
    """Incarnations of Ds that had it, the present one included, by name."""
    dispatched: bool = False
    writes: bool = False
    """Its D has written something."""
    moves: int = 0
    """How often the answer went to another D since its last token: its places in queues that were lost."""
    crashes: CrashHistory = field(default_factory=CrashHistory)
    """Decode workers that it has lost in a row, since one last wrote a token for it."""
    asked_s: float = 0.0
    """When the current one was asked."""
    resumes: int = 0
    """How often the answer lost or left its D after it had begun."""
    losses: Losses = field(default_factory=Losses)
    """The losses among ``resumes`` that count against the answer."""
    cached_before: int | None = None
    """P's cached tokens when that happened for the first time."""
    load_at_first: tuple[int, int] | None = None
    """Sequences and KV tokens at D when the first token came; before it, and of an answer in one piece, when D was
    asked."""
    answered_s: float | None = None
    """When the whole answer came, in one piece."""

    @property
    def request_id(self) -> str:
        return self.ask.facts.request_id

    @property
    def ready_for_decode(self) -> bool:
        return all(leg.ready for leg in self.legs) or any(leg.state is LegState.FAILED for leg in self.legs)

    @property
    def cached_tokens(self) -> int | None:
        """P's cached tokens, all prompts together; None when no P had a part in it, so that D's own count is right."""
        if self.resumes:
            return self.cached_before
        if not any(leg.began for leg in self.legs):
            return None
        return sum(leg.cached_tokens or 0 for leg in self.legs)

    @property
    def went_as_planned(self) -> bool:
        """Everything ran where it was first sent."""
        return not self.resumes and len(self.tried_decode) == 1 and all(len(leg.tried) == 1 for leg in self.legs)

    def leg_of(self, transfer: str) -> PromptLeg | None:
        """The leg whose current attempt is ``transfer``."""
        return next((leg for leg in self.legs if leg.transfer == transfer), None)

    def transfers(self) -> tuple[str, ...]:
        """Transfers that may bring pages: they did not fail, nor did their legs before they began."""
        legs = (leg for leg in self.legs if leg.began or leg.state is not LegState.FAILED)
        return tuple(leg.transfer for leg in legs if not leg.transfer_failed)

    def page_dtypes(self, own: str) -> tuple[str, ...]:
        """Types of the pages on their way that are not D's ``own``."""
        return tuple(sorted({leg.page_dtype for leg in self.legs} - {own, ""}))

    def prefill_reservations(self) -> list[PrefillReservation]:
        return [leg.reservation for leg in self.legs if leg.reservation is not None]
