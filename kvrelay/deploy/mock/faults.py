"""What is wrong with a mock worker, on demand. A value: whoever changes it puts another one in its place."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.errors import Misconfigured
from kvrelay.types import Value


class Params(StrEnum):
    """What a worker makes of ``kv_transfer_params``."""

    SOUND = "sound"
    STALE = "stale"
    """It takes those of the request before."""
    GARBAGE = "garbage"
    """It cannot read what it gets, and answers with what nobody can read."""


class Faults(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of one mock worker; the default is none."""

    hang: bool = False
    """The engine takes no step; its API server still answers ``/health``, as vLLM's does."""
    dead: bool = False
    """Gone without a goodbye: connections are reset, its KV cache is lost. Taken back: it is born anew."""
    slow: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Each step takes so many times as long."""
    step_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """No step is shorter. Tokens come slowly then, and a step computes as much of prompts as ever."""
    status: Annotated[int, Meta(ge=0, le=599)] = 0
    """HTTP status of every answer, e.g. 500; 0: answers as they should be."""
    drop_after: Annotated[int, Meta(ge=0)] | None = None
    """Answers break off after so many tokens."""
    lose_events: Annotated[int, Meta(ge=0)] = 0
    """So many messages about its pages are lost on their way to the routers, counted down as they are."""
    params: Params = Params.SOUND
    mute: bool = False
    """Nothing comes out of it and nothing gets in, and no connection is closed: its network is cut."""
    clock_s: Annotated[float, Meta(ge=-1e9, le=1e9)] = 0.0
    """Its wall clock is so far ahead."""
    full: bool = False
    """The store has no free slot, nor will have one; what it has stays."""
    apart: bool = False
    """The store reaches no other store, nor do others reach it; routers hear it as ever."""


def parse(text: str) -> Faults:
    """Faults as ``hang=true,slow=3``. Raises ``Misconfigured``."""
    given = dict(_pair(part) for part in text.split(",") if part)
    try:
        return msgspec.convert(given, Faults, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(Faults.__struct_fields__)
        raise Misconfigured(f"{text!r} is no fault: {error}; known are {known}, as in hang=true,slow=3") from error


def _pair(part: str) -> tuple[str, str]:
    key, _, value = part.partition("=")
    return key.strip(), value.strip() or "true"


class Condition:
    """The faults of one worker now, whichever incarnation of it."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __repr__(self) -> str:
        return f"<Condition {self.faults}>"

    def loses_event(self) -> bool:
        """Whether the message about pages that is to be sent now is lost; counted down."""
        left = self.faults.lose_events
        if left:
            self.faults = msgspec.structs.replace(self.faults, lose_events=left - 1)
        return left > 0
