"""What really happened, in the items of the prediction. It must never make up an item that nobody saw begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.cost import Item
from kvrelay.policy.route import Path
from kvrelay.types import Value


class Actual(Value, frozen=True, kw_only=True):
    """Seconds of one request, from the decision on."""

    items: tuple[tuple[str, float], ...]
    """``cost.Item`` and seconds, those that were seen."""
    together: tuple[tuple[tuple[str, ...], float], ...] = ()
    """Items between which nobody sees a border, in order, and the seconds of all of them."""
    ttft_s: float | None = None
    tpot_s: float | None = None

    def report(self) -> dict[str, object]:
        """JSON-ready; what was not seen is left out."""
        known: dict[str, object] = {"cost_s": {name: round(seconds, 6) for name, seconds in self.items}}
        if self.together:
            known["together"] = [{"items": items, "seconds": round(seconds, 6)} for items, seconds in self.together]
        if self.ttft_s is not None:
            known["ttft_s"] = round(self.ttft_s, 6)
        if self.tpot_s is not None:
            known["tpot_s"] = round(self.tpot_s, 6)
        return known


def actual(timeline: Timeline, answers: int = 1) -> Actual:
    """What ``timeline`` says so far; ``answers`` shared its output tokens."""
    events, stretches = timeline.events, list(_stretches(timeline))
    first, routed, finished = events.get("first_token"), events.get("routed"), events.get("finished")
    each = timeline.output_tokens / answers
    return Actual(
        items=tuple((items[0], seconds) for items, seconds in stretches if len(items) == 1),
        together=tuple((items, seconds) for items, seconds in stretches if len(items) > 1),
        ttft_s=None if first is None or routed is None else max(0.0, first - routed),
        tpot_s=None if first is None or finished is None or each <= 1 else (finished - first) / (each - 1),
    )


Items = tuple[Item, ...]


def _stretches(timeline: Timeline) -> Iterator[tuple[Items, float]]:
    """Between moments that were seen, what went on, and for how long."""
    events = timeline.events
    moments: list[tuple[Items, float | None]] = [((), events.get("routed"))]
    if "prefix_ready" in events:
        moments.append(((Item.SOURCE,), events["prefix_ready"]))
    moments += _of_two(events) if timeline.path == Path.REMOTE_PREFILL else _of_one(events)
    for (_, begin), (items, end) in pairwise(moments):
        if items and begin is not None and end is not None:
            yield items, max(0.0, end - begin)


def _of_two(events: Mapping[str, float]) -> list[tuple[Items, float | None]]:
    """The stretches of a request over two workers. P reports when it begins and ends; D does not report what it waits
    for."""
    computed = events.get("prefill_finished")
    # Pages may be loaded before P's own answer is here: then they were in place when P answered.
    ready = max(computed, events.get("loaded", computed)) if computed is not None else None
    return [
        ((Item.QUEUE,), events.get("prefill_started")),
        ((Item.PREFILL,), computed),
        ((Item.TRANSFER,), ready),
        ((Item.DECODE_WAIT, Item.ANSWER), events.get("first_token")),
    ]


def _of_one(events: Mapping[str, float]) -> list[tuple[Items, float | None]]:
    """D computes the prompt when it comes to it: only its first token is seen."""
    return [((Item.PREFILL, Item.DECODE_WAIT, Item.ANSWER), events.get("first_token"))]
