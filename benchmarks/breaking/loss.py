"""What the loss of a decode worker cost one stream, split at the moment when the router noticed it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.breaking.asking import Stream

RESTORE_S = 0.5
RE_PREFILL_TTFTS = 1.3
"""What is allowed after the detection: where the pages are found; and where none are, so many times as long as such a
prompt's first token takes, prefill and all."""


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 3), "worst": round(ordered[-1], 3), "count": len(ordered)}


@dataclass(frozen=True)
class Loss:
    """One stream that went on elsewhere."""

    detection_s: float
    """From the deed until the router gave the worker up for this stream."""
    pause_s: float
    """Between two tokens, as the client saw it."""
    ttft_s: float
    """What the first token of another such prompt takes, with nothing cached and nothing else to do."""
    written_tokens: int
    """Prompt and answer until then."""
    cached_tokens: int
    """Those of them that the router expected to be loaded."""
    is_equal: bool

    @classmethod
    def of(cls, stream: Stream, *, prompt_tokens: int, hurt_s: float, ttft_s: float, right: Stream) -> Loss:
        """``hurt_s``: the moment of the deed, on the clock of the stream."""
        lost = stream.timeline["resumptions"][0]
        return cls(
            detection_s=stream.received_s + lost["lost_at"] - hurt_s,
            pause_s=stream.longest_pause_s,
            ttft_s=ttft_s,
            written_tokens=prompt_tokens + lost["tokens"],
            cached_tokens=lost.get("cached_tokens", 0),
            is_equal=stream.is_whole and stream.tokens == right.tokens,
        )

    @property
    def beyond_s(self) -> float:
        """What the recovery itself took."""
        return self.pause_s - self.detection_s


def table(losses: Sequence[Loss], *, restored: bool) -> dict[str, Any]:
    """``losses`` in figures, beside what is allowed."""
    ttft_s = statistics.median(loss.ttft_s for loss in losses)
    return {
        "streams": len(losses),
        "equal": sum(loss.is_equal for loss in losses),
        "tokens": spread([loss.written_tokens for loss in losses]),
        "cached_tokens": spread([loss.cached_tokens for loss in losses]),
        "detection_s": spread([loss.detection_s for loss in losses]),
        "pause_s": spread([loss.pause_s for loss in losses]),
        "beyond_detection_s": spread([loss.beyond_s for loss in losses]),
        "ttft_s": round(ttft_s, 3),
        "allowed_beyond_s": round(RESTORE_S if restored else RE_PREFILL_TTFTS * ttft_s, 3),
    }
