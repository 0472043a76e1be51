"""What one streamed answer has said so far: token ids and how much of their text was sent. It must never hold more
tokens than the request allowed, nor be taken for whole when a token is missing."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

SPARE_TOKENS = 1
"""Workers may count an end token that the limit does not."""


@dataclass(frozen=True)
class Sent:
    """What the client had of one choice at one moment."""

    ids: Sequence[int]
    chars: int
    digest: int

    def matches(self, text: str) -> bool:
        """Whether ``text`` begins with exactly that."""
        sent = text[: self.chars]
        return len(sent) == self.chars and _digest(sent) == self.digest


class ChoiceLog:
    """One choice of the answer."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        """Which of the request's prompts it answers."""
        self.ids = array("I")
        self.sent_chars = 0
        self.token_chars = 0
        """Characters of all tokens whose log probabilities were sent: where engines say that the next token begins.
        Each counts by itself, also one that is half a character, or was not sent for a stop string."""
        self.begun = False
        """The client knows of it."""
        self.finished = False
        self.is_exact = True
        """All its tokens are known."""
        self.is_plain = True
        """It said nothing but text."""
        self._digest = 0

    def __repr__(self) -> str:
        state = "finished" if self.finished else "open" if self.is_exact else "not exact"
        return f"<ChoiceLog {len(self.ids)} tokens, {self.sent_chars} characters, {state}>"

    def sent(self) -> Sent:
        """As it is now, whatever is written on meanwhile."""
        return Sent(ids=self.ids[:], chars=self.sent_chars, digest=self._digest)

    def place(self, tokens: Sequence[str]) -> list[int]:
        """Where each of ``tokens``, the next ones, begins."""
        offsets = []
        for token in tokens:
            offsets.append(self.token_chars)
            self.token_chars += len(token)
        return offsets

    def said(self, text: str) -> None:
        self.sent_chars += len(text)
        self._digest = _digest(text, self._digest)


def _digest(text: str, before: int = 0) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


class Journal:
    """All choices of an answer, by the index that the client sees."""

    def __init__(self, prompts: int, choices: int, limits: Sequence[int]) -> None:
        """``limits``: most tokens of each choice of a prompt, by prompt."""
        self.choices = [ChoiceLog(index // choices) for index in range(prompts * choices)]
        self._limits = limits
        self.tokens = 0

    def __repr__(self) -> str:
        return f"<Journal {self.tokens} tokens, {len(self.open)} of {len(self.choices)} choices open>"

    @property
    def open(self) -> list[int]:
        """Choices that have not come to their end."""
        return [index for index, choice in enumerate(self.choices) if not choice.finished]

    @property
    def is_exact(self) -> bool:
        """Whether all tokens of what is still open are known."""
        return all(choice.is_exact for choice in self.choices if not choice.finished)

    @property
    def is_plain(self) -> bool:
        """Whether what is still open has said nothing but text."""
        return all(choice.is_plain for choice in self.choices if not choice.finished)

    def wrote(self, index: int, ids: Sequence[int], text: str, finished: bool = False, plain: bool = True) -> None:
        """A piece of choice ``index`` goes to the client. ``plain``: false when the piece says more than ``text``."""
        if not 0 <= index < len(self.choices):
            self.spoil()  # a worker that answers what nobody asked: nothing of it can be gone on with
            return
        choice = self.choices[index]
        kept = choice.ids
        if len(kept) + len(ids) <= self._limits[choice.prompt] + SPARE_TOKENS:
            kept.extend(ids)
        else:
            choice.is_exact = False
        self.tokens += len(ids)
        choice.begun = True
        if text and not kept:
            choice.is_exact = False
        if not plain:
            choice.is_plain = False
        if finished:
            choice.finished = True
        if text:
            choice.said(text)

    def place(self, index: int, tokens: Sequence[str]) -> None:
        """Log probabilities of ``tokens`` of choice ``index`` go to the client."""
        if 0 <= index < len(self.choices):
            self.choices[index].place(tokens)

    def spoil(self) -> None:
        """Something was sent that could not be read."""
        for choice in self.choices:
            choice.is_exact = False
