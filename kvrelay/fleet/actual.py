"""What really happened, in the items of the prediction. It must never make up an item that nobody saw begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.cost import Item
from kvrelay.policy.route import Path
from kvrelay.types import Value


class Actual(Value, frozen=True, kw_only=True):
    """Seconds of one request, from the decision on."""

    items: tuple[tuple[str, float], ...]
    """``cost.Item`` and seconds, those that were seen."""
    ttft_s: float | None = None
    tpot_s: float | None = None

    def report(self) -> dict[str, object]:
        """JSON-ready; what was not seen is left out."""
        known: dict[str, object] = {"cost_s": {name: round(seconds, 6) for name, seconds in self.items}}
        if self.ttft_s is not None:
            known["ttft_s"] = round(self.ttft_s, 6)
        if self.tpot_s is not None:
            known["tpot_s"] = round(self.tpot_s, 6)
        return known


def actual(timeline: Timeline, answers: int = 1) -> Actual:
    """What ``timeline`` says so far; ``answers`` shared its output tokens."""
    events = timeline.events
    first, routed, finished = events.get("first_token"), events.get("routed"), events.get("finished")
    each = timeline.output_tokens / answers
    return Actual(
        items=tuple(_items(timeline)),
        ttft_s=None if first is None or routed is None else max(0.0, first - routed),
        tpot_s=None if first is None or finished is None or each <= 1 else (finished - first) / (each - 1),
    )


def _items(timeline: Timeline) -> Iterator[tuple[Item, float]]:
    events = timeline.events
    computed = events.get("prefill_finished")
    # Who overtook P's own answer was in place when it wrote.
    ready = max(computed, events.get("loaded", computed)) if computed is not None else None
    moments: list[tuple[Item | None, float | None]] = [(None, events.get("routed"))]
    if "prefix_ready" in events:
        moments.append((Item.SOURCE, events["prefix_ready"]))
    if timeline.path == Path.REMOTE_PREFILL:
        moments += [
            (Item.QUEUE, events.get("prefill_started")),
            (Item.PREFILL, computed),
            (Item.TRANSFER, ready),
            (Item.ANSWER, events.get("first_token")),
        ]
    for (_, begin), (item, end) in pairwise(moments):
        if item is not None and begin is not None and end is not None:
            yield item, max(0.0, end - begin)
