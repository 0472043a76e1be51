"""What one hand-off moved and how long it took. A frozen value: each piece of news makes the next one."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage, Transport, Value

MAX_FAILURE_CHARS = 200


class TransferRecord(Value, frozen=True, kw_only=True):
    """One transfer. Moments are seconds since its request was received, on the router's clock."""

    transfer: str
    prompt_tokens: int
    attempt: int = 0
    """How many P's had been asked for its prompt before."""
    restarts: int = 0
    """How often a store began it again."""
    transport: Transport = Transport.LOCAL
    bytes: int = 0
    pages: int = 0
    runs: int = 0
    """Pieces of memory without a gap that the bytes were received in."""
    late_bytes: int = 0
    """Bytes that were still to move when the prefill ended."""
    seconds: float = 0.0
    """From the first byte in to the last page complete."""
    moving_s: float = 0.0
    """Seconds with bytes on their way, until D's store said that it has them, verified."""
    loaded_tokens: int = 0
    failure: str = ""
    """Why not all of it came; empty when it did, or may still."""
    started_at: float | None = None
    computed_at: float | None = None
    arrived_at: float | None = None
    loaded_at: float | None = None

    @property
    def outcome(self) -> str:
        """``arrived``, ``failed``, or ``open`` as long as neither is known."""
        if self.failure:
            return "failed"
        return "open" if self.arrived_at is None else "arrived"

    @property
    def is_settled(self) -> bool:
        """Nothing more is to be heard of its bytes: it failed, or both stores told their part."""
        return bool(self.failure) or (self.arrived_at is not None and (not self.bytes or self.moving_s > 0.0))

    @property
    def exposed_s(self) -> float | None:
        """Seconds of the hand-off that the prefill did not hide; None until both ends are known."""
        if self.loaded_at is None or self.computed_at is None:
            return None
        return max(0.0, self.loaded_at - self.computed_at)

    @property
    def hidden_s(self) -> float | None:
        """Seconds of the hand-off that lie before the end of the prefill."""
        if self.loaded_at is None or self.started_at is None or self.exposed_s is None:
            return None
        return max(0.0, self.loaded_at - self.started_at - self.exposed_s)

    @property
    def gb_per_s(self) -> float | None:
        """Speed while bytes were on their way; None when none were."""
        return gb_per_s(self.bytes, self.moving_s)

    def computed(self, at: float) -> TransferRecord:
        """P answered."""
        return msgspec.structs.replace(self, computed_at=at)

    def lost(self, reason: str) -> TransferRecord:
        """Its P is gone: a failure, unless everything has arrived or it is known why it does not."""
        return self if self.outcome != "open" else msgspec.structs.replace(self, failure=reason)

    def after(self, event: TransferEvent, at: float) -> TransferRecord:
        """The record once a milestone of the transfer is known."""
        return msgspec.structs.replace(self, **self._news(event, at))

    def _news(self, event: TransferEvent, at: float) -> dict[str, Any]:
        match event.stage:
            case Stage.STARTED:
                return {"started_at": at if self.started_at is None else self.started_at}
            case Stage.SENT:
                return {"moving_s": event.moving_s, "late_bytes": event.late_bytes, "restarts": event.retries}
            case Stage.ARRIVED:
                named = ("transport", "bytes", "pages", "runs", "seconds")
                return {name: getattr(event, name) for name in named} | {"arrived_at": at}
            case Stage.LOADED:
                # Every choice of a request reports its own load of the same pages: the largest is what was moved.
                tokens = min(max(event.tokens, self.loaded_tokens), self.prompt_tokens)
                return {"loaded_tokens": tokens, "loaded_at": at}
            case Stage.FAILED:
                return {"failure": self.failure or event.reason[:MAX_FAILURE_CHARS] or "no reason given"}
        return {}

    def report(self) -> dict[str, object]:
        """JSON-ready; what is not known is left out."""
        known: dict[str, object] = {
            "transfer": self.transfer,
            "outcome": self.outcome,
            "transport": self.transport.value if self.arrived_at is not None else None,
            "bytes": self.bytes,
            "late_bytes": self.late_bytes,
            "pages": self.pages,
            "runs": self.runs,
            "retries": self.attempt + self.restarts,
            "loaded_tokens": self.loaded_tokens,
            "moving_s": self.moving_s,
            "gb_per_s": self.gb_per_s,
            "hidden_s": self.hidden_s,
            "exposed_s": self.exposed_s,
            "failure": self.failure or None,
        }
        return {key: value for key, value in known.items() if value is not None}


def gb_per_s(size_bytes: int, moving_s: float) -> float | None:
    """10^9 bytes a second; None when nothing moved."""
    return size_bytes / moving_s / 1e9 if size_bytes and moving_s > 0 else None
