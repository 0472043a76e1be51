"""What became of an answer that was asked for while things broke. It must never call an answer right that was not seen
whole."""

from __future__ import annotations

import re
from collections import Counter
from enum import StrEnum

import msgspec

from kvrelay.types import Value

MAX_TOLD = 10
"""Failures that are told in words, those with a story left out."""


MAX_CAUSES = 32
MAX_CAUSE_CHARACTERS = 160
_OTHER = "other causes"


class Verdict(StrEnum):
    """How one request of a chaos run ended."""

    RIGHT = "right"
    """The same answer as before anything broke, whole."""
    REFUSED = "refused"
    """An error status before the first byte."""
    ENDED = "ended"
    """It began right, then an error event."""
    CUT = "cut"
    """It began right, then the connection broke."""
    CANCELLED = "cancelled"
    """Its client went away on purpose."""
    WRONG = "wrong"
    """Another answer, or one that says that it is whole and is not."""
    HUNG = "hung"
    """Nothing came for too long."""


class Seen(Value, frozen=True, kw_only=True):
    """What a client got."""

    text: str = ""
    status: int = 0
    """0: no answer at all."""
    done: bool = False
    """``[DONE]`` came."""
    error: bool = False
    """An error event came."""
    said: str = ""
    """Words of the error event, or of a refusal."""
    hung: bool = False
    story: str = ""
    """What a request that hung waited for, as its router says."""
    cancelled: bool = False
    longest_pause_s: float = 0.0
    """Between two events, or before the first one."""


def judge(seen: Seen, expected: str) -> Verdict:
    """``expected``: the whole answer."""
    if not expected.startswith(seen.text) or (seen.done and not seen.error and seen.text != expected):
        return Verdict.WRONG
    if seen.hung:
        return Verdict.HUNG
    if seen.cancelled:
        return Verdict.CANCELLED
    if seen.status >= 400:
        return Verdict.REFUSED
    if seen.error:
        return Verdict.WRONG if seen.done else Verdict.ENDED
    return Verdict.RIGHT if seen.done else Verdict.CUT


def cause(seen: Seen, verdict: Verdict) -> str | None:
    """Why a request was not answered, in the words of whoever did not, without their numbers; None when it was, when
    its client went away, or when what it got is a failure that is told by itself."""
    said = re.sub(r"\d+(\.\d+)?", "N", seen.said)[:MAX_CAUSE_CHARACTERS]
    match verdict:
        case Verdict.REFUSED:
            return f"{verdict} with {seen.status}: {said}"
        case Verdict.ENDED:
            return f"{verdict}: {said}"
        case Verdict.CUT:
            return f"{verdict}: {'its connection broke' if seen.status else 'no answer at all'}"
    return None


class Tally:
    """Verdicts and pauses of many requests."""

    def __init__(self) -> None:
        self.verdicts: Counter[Verdict] = Counter()
        self.causes: Counter[str] = Counter()
        """Why requests were not answered, and how many each."""
        self.pauses_s: list[float] = []
        """Longest pause of each right answer."""
        self.failures: list[str] = []
        """What was wrong, in words; the first ones."""

    def __repr__(self) -> str:
        return f"<Tally {dict(self.verdicts)}>"

    def add(self, seen: Seen, expected: str, what: str) -> Verdict:
        verdict = judge(seen, expected)
        self.verdicts[verdict] += 1
        if (why := cause(seen, verdict)) is not None:
            self.causes[why if why in self.causes or len(self.causes) < MAX_CAUSES else _OTHER] += 1
        if verdict is Verdict.RIGHT:
            self.pauses_s.append(seen.longest_pause_s)
        elif verdict in (Verdict.WRONG, Verdict.HUNG) and (seen.story or len(self.failures) < MAX_TOLD):
            shown = msgspec.structs.replace(seen, story="")
            story = f": {seen.story}" if seen.story else ""
            failure = f"{what}: {verdict}{story}" + f"; {shown!r}, expected {expected!r}"[:2000]
            # Those with a story come later, since their router has to be asked, and say more; there are not many.
            self.failures.insert(0 if story else len(self.failures), failure)
            del self.failures[2 * MAX_TOLD :]
        return verdict

    def pause_s(self, share: float) -> float:
        """The pause that ``share`` of the right answers did not exceed; 0 without any."""
        ordered = sorted(self.pauses_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
