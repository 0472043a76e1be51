"""Reads along what a worker streams and writes it into the journal. It must never change more of what the client gets
than the token ids that only the router asked for."""

from __future__ import annotations

import re

import msgspec

from kvrelay.fleet.journal import Journal
from kvrelay.router.failures import blames_client
from kvrelay.router.sse import DONE, END, error_status, has_error

# A quote inside generated text is escaped in JSON, so these keys are never found inside a string.
_IDS = re.compile(rb'("(?:prompt_)?token_ids"\s*:\s*)\[[0-9,\s]*\]')
_DATA = b"data: "
_ABORTED = frozenset({"abort", "error"})
"""Reasons to finish that are the engine's own trouble: it was told to stop, or it failed."""


class Head(msgspec.Struct, frozen=True):
    """What all events of one answer have in common."""

    id: str = ""
    created: int = 0
    model: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: object = None
    reasoning_content: object = None
    tool_calls: object = None

    @property
    def is_plain(self) -> bool:
        return not (self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: object = None


_read_event = msgspec.json.Decoder(_Event).decode
_read_head = msgspec.json.Decoder(Head).decode


class Tap:
    """One answer from its first worker."""

    def __init__(self, journal: Journal, *, keeps_ids: bool) -> None:
        """``keeps_ids``: the client asked for token ids itself."""
        self.journal = journal
        self.keeps_ids = keeps_ids
        self.head = Head()
        self.usage_sent = False

    def __repr__(self) -> str:
        return f"<Tap into {self.journal!r}>"

    def take(self, block: bytes) -> tuple[bytes, bool]:
        """What of ``block`` goes to the client, and whether the worker gave up in it."""
        if not self.head.id:
            self.head = _head(block)
        end, gave_up = len(block), False
        begin = 0
        while begin < len(block):
            after = block.find(END, begin) + len(END)
            if self._gives_up(block[begin:after]):
                end, gave_up = begin, True
                break
            begin = after
        passed = block[:end]
        return (passed if self.keeps_ids else without_ids(passed)), gave_up

    def _gives_up(self, event: bytes) -> bool:
        """Journal one event, unless it says that the worker cannot go on."""
        if event == DONE:
            return False
        if has_error(event):
            return not blames_client(error_status(event) or 500)
        try:
            read = _read_event(event[len(_DATA) : -len(END)])
        except msgspec.DecodeError:
            self.journal.spoil()  # it is the client's to make sense of
            return False
        if any(choice.finish_reason in _ABORTED for choice in read.choices):
            return True
        for choice in read.choices:
            self._note(choice)
        self.usage_sent = self.usage_sent or (not read.choices and read.usage is not None)
        return False

    def _note(self, choice: _Choice) -> None:
        delta = choice.delta
        text = (choice.text if delta is None else delta.content) or ""
        exact = delta is None or delta.is_plain
        finished = choice.finish_reason is not None
        self.journal.wrote(choice.index, choice.token_ids or (), text, finished=finished, exact=exact)


def without_ids(data: bytes) -> bytes:
    """``data`` as it would be had nobody asked for token ids."""
    return _IDS.sub(rb"\1null", data)


def _head(block: bytes) -> Head:
    """Of the first event of ``block``."""
    try:
        return _read_head(block[len(_DATA) : block.find(END)])
    except msgspec.DecodeError:
        return Head()
