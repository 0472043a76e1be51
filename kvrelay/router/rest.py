"""The text of an answer whose rest another engine writes: it goes on at the very character where the first part ended,
and ends where a stop string does, also one that began before the cut. No I/O happens here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvrelay.errors import Malformed
from kvrelay.types import Value


class Differs(Malformed):
    """What a worker writes does not join on to what the client has. Another one would write the same."""


class StopRules(Value, frozen=True, kw_only=True):
    """Where the client wants its answer to end."""

    stops: tuple[str, ...] = ()
    included: bool = False
    """What ended the answer, a string or a token, is part of its text."""
    min_tokens: int = 0
    """No end before so many tokens."""

    @property
    def held_chars(self) -> int:
        """Characters that wait for the next ones, since a stop string may begin with them."""
        return 0 if self.included or not self.stops else max(map(len, self.stops)) - 1


class Part(NamedTuple):
    """What the client gets of an event: its tokens from ``begin`` to ``end``, and a text."""

    begin: int
    end: int
    text: str


class RestOfText:
    """One choice from the cut on. ``text`` is all of its text, that of before the cut included."""

    def __init__(
        self, step: Callable[[int], str], rules: StopRules, *, text: str, tokens: int, sent_chars: int
    ) -> None:
        """``step`` turns a token into text; ``text`` of ``tokens`` was written before, ``sent_chars`` of it sent."""
        self._step = step
        self._rules = rules
        self._tokens = tokens
        self._sent_chars = sent_chars
        self.text = text
        self.stopped_by: str | None = None
        """The stop string that ended it, of which the second worker does not know."""

    def __repr__(self) -> str:
        return f"<RestOfText {self._tokens} tokens, {self._sent_chars} of {len(self.text)} characters sent>"

    def read(self, ids: Sequence[int], said: str, reason: str | None) -> Part | None:
        """What of an event is new. What the worker ``said`` is of no use: it does not know what came before.

        Raises ``Differs`` when it keeps the tokens of a text to itself.
        """
        if said and not ids:
            raise Differs("a worker tells a text without its tokens")
        end = self.write(ids, ended_by_token=reason == "stop")
        return Part(0, end, self.take(finished=reason is not None or self.stopped_by is not None))

    def write(self, ids: Sequence[int], *, ended_by_token: bool = False) -> int:
        """Take tokens; how many of them belong to the answer. ``ended_by_token``: the last one is its end token."""
        for count, token in enumerate(ids, 1):
            hidden = ended_by_token and count == len(ids) and not self._rules.included
            before = len(self.text)
            self.text += "" if hidden else self._step(token)
            self._tokens += 1
            if self._tokens > self._rules.min_tokens and self._stops(len(self.text) - before):
                return count
        return len(ids)

    def _stops(self, new_chars: int) -> bool:
        """Whether a stop string ends in the last ``new_chars`` characters; of several the one that ends first."""
        found = []
        for stop in self._rules.stops if new_chars else ():
            begin = self.text.find(stop, max(0, len(self.text) - new_chars - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if not found:
            return False
        end, begin, self.stopped_by = min(found, key=lambda each: each[0])
        self.text = self.text[: end if self._rules.included else begin]
        return True

    def take(self, *, finished: bool) -> str:
        """The text that may be sent now and was not."""
        ready = len(self.text) - (0 if finished else self._rules.held_chars)
        if ready <= self._sent_chars:
            return ""
        begin, self._sent_chars = self._sent_chars, ready
        return self.text[begin:ready]
