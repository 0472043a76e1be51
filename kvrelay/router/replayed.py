"""The text of an answer that is written once more from its beginning: what the client has is dropped, token by token
and character by character. It must never let anything through before the second writing is seen to equal the first."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.fleet.journal import Sent
from kvrelay.router.rest import Differs, Part


class ReplayedText:
    """One choice. Stop strings are the worker's to find: it writes the whole answer."""

    stopped_by: str | None = None

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._expected = list(sent.ids)
        self._seen = 0
        self._skipped = ""
        self._skip_chars = sent.chars

    def __repr__(self) -> str:
        return f"<ReplayedText {self._seen} of {len(self._expected)} tokens again>"

    def read(self, ids: Sequence[int], said: str, reason: str | None) -> Part | None:
        """What of an event is new; None: nothing. Raises ``Differs`` when it is not what was written before."""
        begin = min(len(ids), len(self._expected) - self._seen)
        if list(ids[:begin]) != self._expected[self._seen : self._seen + begin]:
            raise Differs("a worker did not write the tokens that it was to repeat")
        self._seen += begin
        text = self._beyond(said)
        if self._seen < len(self._expected):
            if text or reason is not None:
                raise Differs("a worker's repetition is not as long as the first writing")
            return None
        if begin == len(ids) and not text and reason is None:
            return None
        return Part(begin, len(ids), text)

    def _beyond(self, said: str) -> str:
        """``said`` without the characters that were sent."""
        if not self._skip_chars:
            return said
        self._skipped += said[: self._skip_chars]
        text, self._skip_chars = said[self._skip_chars :], max(0, self._skip_chars - len(said))
        if not self._skip_chars and not self._sent.matches(self._skipped):
            raise Differs("a worker's repetition has another text")
        return text
