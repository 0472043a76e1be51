"""What happened to the last requests: one timeline each. It must never hold prompt text, tokens or page names."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvrelay.fleet.prefix_wait import PrefixWait
from kvrelay.fleet.record import TransferRecord, gb_per_s
from kvrelay.fleet.resumption import Resumption
from kvrelay.policy.admit import Despite, Slo
from kvrelay.policy.route import Decision, Option
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage, Transport

NOT_BEGUN = "none"
"""Path of a request that no worker was asked for."""
KEPT_REQUESTS = 1000
KEPT_UNSTARTED = 250
"""Requests kept that were not begun. They are kept apart: a storm of refusals would push out the others within a
second."""
KEPT_LOSSES = 16
KEPT_CHOICES = 8
"""Choices kept of one request: those of its first prompts, and of its first retries."""


@dataclass
class Timeline:
    """One request's events in seconds since it was received, and its outcome."""

    request_id: str
    tenant: str
    received_s: float
    slo: Slo = field(default_factory=Slo)
    despite: Despite | None = None
    """Why it was let in although it was predicted to miss what was promised; None: it was not."""
    path: str = ""
    local_reason: str = ""
    refusal: str = ""
    """Why it was turned away before it was begun, as its client was told."""
    failure: str = ""
    """Why it ended otherwise than with an answer, as its client was told."""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    status: int | None = None
    """HTTP status of the answer, or ``CLIENT_CLOSED``; None while running."""
    events: dict[str, float] = field(default_factory=lambda: {"received": 0.0})
    transfers: dict[str, TransferRecord] = field(default_factory=dict)
    """One record a prompt and attempt, by the transfer's id."""
    decisions: list[tuple[str, Decision]] = field(default_factory=list)
    """What was chosen, and how: the first one is about the whole request, others about further prompts and retries."""

    resumptions: list[Resumption] = field(default_factory=list)
    """Every time that its decode worker was lost in mid-answer. Events are those of the first one."""
    waits: list[PrefixWait] = field(default_factory=list)
    """For prefixes that others computed or pushed."""

    def held(self, wait: PrefixWait) -> None:
        """A prompt is held back."""
        if len(self.waits) < KEPT_CHOICES:
            self.waits.append(wait)

    def released(self, index: int, ending: str, now: float) -> None:
        """The prompt is held no more."""
        self.mark("prefix_ready", now)
        for position, wait in enumerate(self.waits):
            if wait.index == index and wait.waited_s is None:
                ended = msgspec.structs.replace(wait, waited_s=now - wait.since_s, ending=ending)
                self.waits[position] = ended

    def decide(self, about: str, decision: Decision) -> None:
        """Keep why ``decision`` was made: ``about`` a ``request``, a ``prefill`` or a ``decode``."""
        if len(self.decisions) < KEPT_CHOICES:
            self.decisions.append((about, decision))

    @property
    def predicted(self) -> Option | None:
        """What the request was to cost when it was begun."""
        return self.decisions[0][1].chosen if self.decisions else None

    def mark(self, event: str, now: float) -> None:
        """Note ``event``; of several legs the last one counts, but none of those that came after a resumption."""
        if not self.resumptions or event == "finished":
            self.events[event] = self._since(now)

    def mark_first(self, event: str, now: float) -> None:
        """Note ``event`` unless it was seen before."""
        if event not in self.events:
            self.mark(event, now)

    def note(self, event: TransferEvent, now: float) -> None:
        """A milestone of one of the request's transfers."""
        if event.stage is Stage.STARTED:
            self.mark_first("prefill_started", now)
        elif event.stage is not Stage.FAILED:
            self.mark(event.stage.value, now)
        record = self.transfers.get(event.transfer)
        if record is not None:
            self.transfers[event.transfer] = record.after(event, self._since(now))

    def computed(self, transfer: str, now: float) -> None:
        """P answered the prompt of ``transfer``."""
        self.mark("prefill_finished", now)
        if transfer in self.transfers:
            self.transfers[transfer] = self.transfers[transfer].computed(self._since(now))

    def lost(self, transfer: str) -> None:
        """The P of ``transfer`` failed: what has not arrived will not come."""
        if transfer in self.transfers:
            self.transfers[transfer] = self.transfers[transfer].lost("its prefill worker failed")

    def lose(self, loss: Resumption) -> None:
        """The decode worker is gone, once more."""
        self._settle("failed")
        if len(self.resumptions) < KEPT_LOSSES:
            self.resumptions.append(loss)

    def goes_on_by(self, choice: Mapping[str, object]) -> None:
        """Where the rest is to be written, and how it gets there: fields of a ``Resumption``."""
        self._settle("open", **choice)

    def go_on(self, worker: str, pause_s: float) -> None:
        """``worker`` writes the rest."""
        self.decode_worker = worker
        self._settle("resumed", worker=worker, pause_s=round(pause_s, 6))

    def _settle(self, outcome: str, **more: object) -> None:
        if self.resumptions and self.resumptions[-1].outcome == "open":
            self.resumptions[-1] = msgspec.structs.replace(self.resumptions[-1], outcome=outcome, **more)

    def close(self, status: int, output_tokens: int, now: float) -> None:
        """The request is over."""
        self.status, self.output_tokens = status, output_tokens
        self._settle("failed")
        self.mark("finished", now)

    def _since(self, now: float) -> float:
        return round(now - self.received_s, 6)

    def exposed_s(self) -> float | None:
        """Seconds of the hand-off that the prefill did not hide; None until both ends are known."""
        loaded, computed = self.events.get("loaded"), self.events.get("prefill_finished")
        return None if loaded is None or computed is None else max(0.0, loaded - computed)

    def hidden_s(self) -> float | None:
        """Seconds of prefill_started..loaded that lie before prefill_finished."""
        exposed, started = self.exposed_s(), self.events.get("prefill_started")
        return None if exposed is None or started is None else max(0.0, self.events["loaded"] - started - exposed)

    def report(self) -> dict[str, object]:
        """JSON-ready; absent things are left out."""
        known: dict[str, object] = {
            "request_id": self.request_id,
            "path": self.path,
            "promise": self._promise() or None,
            "local_reason": self.local_reason or None,
            "refusal": self.refusal or None,
            "failure": self.failure or None,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "status": self.status,
            "events": dict(sorted(self.events.items(), key=lambda item: item[1])),
            "transfer": self._transfer(),
            "transfers": [record.report() for record in self.transfers.values()] or None,
            "waits": [wait.report() for wait in self.waits] or None,
            "resumptions": [loss.report() for loss in self.resumptions] or None,
            "decision": [{"about": about, **decision.explain()} for about, decision in self.decisions] or None,
        }
        return {key: value for key, value in known.items() if value is not None}

    def _promise(self) -> dict[str, object]:
        known = {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s, "despite": self.despite}
        return {name: value for name, value in known.items() if value is not None}

    def _transfer(self) -> dict[str, float | int | str] | None:
        """What the request's transfers moved, all prompts together."""
        if not {"arrived", "loaded"} & self.events.keys():
            return None
        records = self.transfers.values()
        size_bytes = sum(record.bytes for record in records)
        wires = sorted({record.transport.value for record in records if record.bytes})
        parts: dict[str, float | int | str | None] = {
            "transport": "+".join(wires) or Transport.LOCAL.value,
            "bytes": size_bytes,
            "late_bytes": sum(record.late_bytes for record in records),
            "seconds": max((record.seconds for record in records), default=0.0),
            "gb_per_s": gb_per_s(size_bytes, sum(record.moving_s for record in records)),
            "loaded_tokens": sum(record.loaded_tokens for record in records),
            "hidden_s": self.hidden_s(),
            "exposed_s": self.exposed_s(),
        }
        return {name: value for name, value in parts.items() if value is not None}


class Ledger:
    """Timelines of all requests that run, and of the last ones that are over.

    Transfers stay findable as long as their request is kept: a LOADED milestone may come after the last token.
    """

    def __init__(self, kept: int = KEPT_REQUESTS, kept_unstarted: int = KEPT_UNSTARTED) -> None:
        self._kept = kept
        self._kept_unstarted = kept_unstarted
        self._timelines: dict[str, Timeline] = {}
        self._over: deque[str] = deque()
        self._unstarted: deque[str] = deque()
        self._owners: dict[str, str] = {}

    def __repr__(self) -> str:
        over, unstarted = len(self._over), len(self._unstarted)
        running = len(self._timelines) - over - unstarted
        kept = f"{over}/{self._kept} over, {unstarted}/{self._kept_unstarted} not begun"
        return f"<Ledger {running} running, {kept}, {len(self._owners)} transfers>"

    def open(self, timeline: Timeline) -> None:
        self._timelines[timeline.request_id] = timeline

    def over(self, request_id: str) -> None:
        """The request has come to its end, to be said once: the oldest of those that are over is forgotten."""
        self._over.append(request_id)
        while len(self._over) > self._kept:
            for transfer in self._timelines.pop(self._over.popleft()).transfers:
                self._owners.pop(transfer, None)

    def keep_unstarted(self, timeline: Timeline) -> None:
        """A request is over that was never begun: the oldest of those is forgotten."""
        self._timelines[timeline.request_id] = timeline
        self._unstarted.append(timeline.request_id)
        while len(self._unstarted) > self._kept_unstarted:
            del self._timelines[self._unstarted.popleft()]

    def own(self, request_id: str, transfer: str, prompt_tokens: int, attempt: int = 0) -> None:
        """Note that ``transfer``, of a prompt of ``prompt_tokens``, belongs to ``request_id``.

        ``attempt``: prefill workers that were asked for the prompt before.
        """
        if request_id in self._timelines:
            self._owners[transfer] = request_id
            record = TransferRecord(transfer=transfer, prompt_tokens=prompt_tokens, attempt=attempt)
            self._timelines[request_id].transfers[transfer] = record

    def get(self, request_id: str) -> Timeline | None:
        return self._timelines.get(request_id)

    def of_transfer(self, transfer: str) -> Timeline | None:
        owner = self._owners.get(transfer)
        return None if owner is None else self._timelines[owner]
