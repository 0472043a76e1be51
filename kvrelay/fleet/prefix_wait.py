"""One wait for a prefix, as a request's timeline keeps it. A frozen value: its end makes the next one."""

from __future__ import annotations

from kvrelay.types import Value


class PrefixWait(Value, frozen=True, kw_only=True):
    """A prompt was held back until a prefix of it would be in reach."""

    index: int
    """Index of the prompt; -1 where D was to compute it."""
    source: str
    """``cost.Kind``: computed or pushed for another request (``underway``), or pulled for this one (``peer``)."""
    origin: str
    """The transfer that was waited for, or the store that it was pulled from."""
    tokens: int
    """Length of the prefix."""
    predicted_s: float
    since_s: float
    """On the clock of ``now``."""
    waited_s: float | None = None
    ending: str = "open"
    """``came``, ``late``, ``lost``; ``open`` as long as nobody knows, for ever when the request ended before."""

    def report(self) -> dict[str, object]:
        """JSON-ready."""
        known: dict[str, object] = {
            "source": self.source,
            "origin": self.origin,
            "tokens": self.tokens,
            "predicted_s": round(self.predicted_s, 6),
            "waited_s": None if self.waited_s is None else round(self.waited_s, 6),
            "ending": self.ending,
        }
        return {key: value for key, value in known.items() if value is not None}
