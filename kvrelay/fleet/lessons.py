"""Learns from what really happened how long things take. It must never take one thing's time for another's."""

from __future__ import annotations

from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import Flight, PromptLeg
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.rates import Law
from kvrelay.fleet.record import TransferRecord
from kvrelay.policy.cost import uncached_tokens
from kvrelay.policy.route import Path

MIN_STEPS = 4
"""Shorter answers say little about a step: the first and last gap are the router's as much as the engine's."""
MIN_WHOLE_STEPS = 16
FIRST_SHARE = 0.25
"""An answer in one piece tells of its steps when it has so many tokens, and no more than this share of its time can be
that of its first token, which nobody saw."""
MIN_MOVED_BYTES = 1 << 20
"""Smaller transfers say nothing about a bandwidth."""
MIN_ANSWER_S = 1e-3
"""D may write before P's own answer is here; the rest is noise of two connections."""


class Lessons:
    """Turns a request's moments into observations."""

    def __init__(self, experience: Experience, loads: Loads) -> None:
        self._experience = experience
        self._loads = loads

    def __repr__(self) -> str:
        return f"<Lessons for {self._experience!r}>"

    def prefill_chosen(self, worker: str) -> None:
        """A prompt is to go there."""
        self._experience.sent(worker, (Law.PREFILL,))

    def decode_chosen(self, worker: str) -> None:
        """An answer is to come from there."""
        self._experience.sent(worker, (Law.STEP, Law.ANSWER))

    def sent(self, leg: PromptLeg, now: float, *, alone: bool) -> None:
        """A prompt was sent to its prefill worker. ``alone``: that has nothing else to do and begins at once, reported
        or not."""
        leg.alone_since_s = now if alone else None

    def computed(self, leg: PromptLeg, now: float) -> None:
        """P answered: how long it took, its way there included, which no other item of the sum has."""
        begun_s = leg.alone_since_s if leg.alone_since_s is not None else leg.begun_s
        if leg.reservation is None or leg.cached_tokens is None or begun_s is None:
            return
        new, seconds = uncached_tokens(leg.prompt_tokens, leg.cached_tokens), now - begun_s
        past = leg.prompt_tokens - new  # a lesson that is kept must not keep the request
        self._experience.saw(leg.reservation.worker, lambda perf: perf.saw_prefill(new, past, seconds))

    def asked(self, flight: Flight) -> None:
        """D is asked for the answer."""
        flight.load_at_first = self._running(flight)

    def first_token(self, flight: Flight, now: float) -> None:
        """D's first token is here."""
        flight.load_at_first = self._running(flight)
        self._count_handoff(flight)
        self._wrote_first(flight, now)

    def answered(self, flight: Flight, now: float) -> None:
        """D's answer came in one piece: what it tells shows once its tokens are counted."""
        flight.answered_s = now
        self._count_handoff(flight)

    def _count_handoff(self, flight: Flight) -> None:
        if flight.path is Path.REMOTE_PREFILL:
            self._experience.handoffs += 1

    def _wrote_first(self, flight: Flight, now: float) -> None:
        if flight.path is Path.REMOTE_PREFILL:
            self._handed_over(flight, now)
        elif flight.timeline.predicted is not None:
            self._computed_itself(flight, now)

    def _handed_over(self, flight: Flight, now: float) -> None:
        if (ready_s := _ready_s(flight)) is not None:
            answer_s = max(MIN_ANSWER_S, now - flight.ask.received_s - ready_s)
            self._experience.saw(flight.decode.worker, lambda perf: perf.saw_answer(answer_s))

    def _computed_itself(self, flight: Flight, now: float) -> None:
        """Learn from a prompt that D computed itself, on an idle D and with no known cached prefix: otherwise other
        work took part of the time."""
        option, sent_s = flight.timeline.predicted, flight.timeline.events.get("decode_sent")
        alone = self._loads.sequences[flight.decode.worker] == flight.decode.sequences
        if option is None or sent_s is None or option.cached_tokens or not alone:
            return
        tokens = sum(flight.ask.facts.prompt_tokens)
        answer_s = self._experience.answer(flight.decode.worker).rates[0]
        # The answer has a way, a step and a way back, with which a prefill starts, too: here they were taken once.
        start_s = min(answer_s, self._experience.prefill(flight.decode.worker).rates[0])
        prefill_s = now - flight.ask.received_s - sent_s - answer_s + start_s
        self._experience.saw(flight.decode.worker, lambda perf: perf.saw_prefill(tokens, 0, prefill_s))

    def finished(self, flight: Flight, now: float) -> None:
        """The request is over: what its transfers and its decode steps took."""
        if flight.path is Path.REMOTE_PREFILL:
            for leg in flight.legs:
                self._moved(leg, flight.timeline.transfers.get(leg.transfer))
        # An answer that was resumed paused meanwhile, and its present ask is of the rest alone.
        if flight.timeline.status == 200 and flight.timeline.output_tokens and not flight.resumes:
            self._decoded(flight, now)

    def _moved(self, leg: PromptLeg, record: TransferRecord | None) -> None:
        if record is None or record.failure or leg.route is None:
            return
        move = self._loads.links.move(*leg.route)
        if record.bytes >= MIN_MOVED_BYTES and record.moving_s:  # else not heard of yet
            move = move.saw_moving(record.bytes, record.moving_s)
        if record.exposed_s is not None:
            move = move.saw_exposed(record.late_bytes, record.exposed_s)
        self._loads.links.learn(*leg.route, move)

    def _decoded(self, flight: Flight, now: float) -> None:
        first = flight.timeline.events.get("first_token")
        each = flight.timeline.output_tokens / flight.ask.sequences
        self._experience.saw_output(flight.ask.facts.model, each)
        if flight.answered_s is not None:
            self._wrote_whole(flight, each, flight.answered_s)
        elif first is not None and each >= MIN_STEPS:
            self._stepped(flight, (now - flight.ask.received_s - first) / (each - 1))

    def _wrote_whole(self, flight: Flight, each: float, now: float) -> None:
        """Learn from an answer of ``each`` tokens that came in one piece. A single token is its first one; of many the
        first took a part of the time that is known, or as long as the others. Where D computed the prompt itself,
        nobody saw when it began to write many."""
        if each <= 1:
            self._wrote_first(flight, now)
        elif each >= MIN_WHOLE_STEPS and (ready_s := _ready_s(flight)) is not None:
            whole_s, law = now - flight.ask.received_s - ready_s, self._experience.answer(flight.decode.worker)
            first_s = law.rates[0] if law.seen else whole_s / each
            if first_s <= FIRST_SHARE * whole_s:
                self._stepped(flight, (whole_s - first_s) / (each - 1))

    def _stepped(self, flight: Flight, step_s: float) -> None:
        if flight.load_at_first is None:
            return
        pairs = zip(flight.load_at_first, self._running(flight), strict=True)
        sequences, kv_tokens = ((before + after) / 2 for before, after in pairs)
        self._experience.saw(flight.decode.worker, lambda perf: perf.saw_step(sequences, kv_tokens, step_s))

    def _running(self, flight: Flight) -> tuple[int, int]:
        worker = flight.decode.worker
        return self._loads.sequences[worker], self._loads.kv_tokens[worker]


def _ready_s(flight: Flight) -> float | None:
    """When the pages of all prompts were with D, as far as it was heard, since the request was received."""
    ready_s = [record.loaded_at or record.computed_at for record in flight.timeline.transfers.values()]
    known = [moment for moment in ready_s if moment is not None]
    return max(known) if known and len(known) == len(ready_s) else None
