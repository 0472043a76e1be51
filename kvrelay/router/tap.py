"""Reads along what a worker streams and writes it into the journal. It must never change more of what the client gets
than the token ids that only the router asked for."""

from __future__ import annotations

import re

import msgspec

from kvrelay.fleet.journal import Journal
from kvrelay.router.failures import blames_client
from kvrelay.router.sse import DONE, END, error_status, has_error

# A quote inside generated text is escaped in JSON, so this is never found inside a string.
_IDS = re.compile(rb'token_ids"\s*:\s*\[[^\]]*\]')
"""Ends ``prompt_token_ids`` as well."""
_NO_IDS = b'token_ids":null'
_DATA = b"data: "
_ERROR = b'"error"'
_REASON = b'"finish_reason":"'
_ABORTED = (b'"finish_reason":"abort"', b'"finish_reason":"error"')
"""Reasons to finish that are the engine's own trouble: it was told to stop, or it failed."""
MAX_UNREAD = 16
"""Events that are read at a time."""


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


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    """Tokens of a completion; a chat has no such list, and no offsets."""


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: object = None


_read_events = msgspec.json.Decoder(list[_Event]).decode
_read_head = msgspec.json.Decoder(Head).decode


class Tap:
    """One answer from its first worker. Events in its middle are read many at a time: that costs a third."""

    def __init__(self, journal: Journal, *, keeps_ids: bool) -> None:
        """``keeps_ids``: the client asked for token ids itself."""
        self._journal = journal
        self._unread: list[bytes] = []
        self.keeps_ids = keeps_ids
        self.head = Head()
        self.usage_sent = False

    def __repr__(self) -> str:
        return f"<Tap into {self._journal!r}, {len(self._unread)} events unread>"

    @property
    def journal(self) -> Journal:
        """The journal with all events that were taken."""
        self._read()
        return self._journal

    def take(self, block: bytes) -> tuple[bytes, bool]:
        """What of ``block`` goes to the client, and whether the worker gave up in it."""
        return (self.middle(block), False) if self.is_middle(block) else self._take_slowly(block)

    def is_middle(self, block: bytes) -> bool:
        """None of its events is the first one or the last."""
        ends = block.endswith(DONE) or _REASON in block or _ERROR in block
        return bool(self.head.id) and not ends

    def middle(self, block: bytes) -> bytes:
        """What of such a ``block`` goes to the client."""
        self._unread += block[len(_DATA) : -len(END)].split(END + _DATA)
        if len(self._unread) >= MAX_UNREAD:
            self._read()
        return block if self.keeps_ids else without_ids(block)

    def _take_slowly(self, block: bytes) -> tuple[bytes, bool]:
        """A block with the first event or the last."""
        if not self.head.id:
            self.head = _head(block)
        begin = 0
        while begin < len(block):
            after = block.find(END, begin) + len(END)
            if self._gives_up(block[begin:after]):
                break
            begin = after
        passed = block[:begin]
        return (passed if self.keeps_ids else without_ids(passed)), begin < len(block)

    def _gives_up(self, event: bytes) -> bool:
        """Take one event, unless it says that the worker cannot go on."""
        if event == DONE:
            return False
        if has_error(event):
            return not blames_client(error_status(event) or 500)
        if any(reason in event for reason in _ABORTED):
            return True
        self._unread.append(event[len(_DATA) :])
        return False

    def _read(self) -> None:
        """Journal what was taken."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        try:
            events = _read_events(b"[%b]" % b",".join(unread))
        except msgspec.DecodeError:
            self._journal.spoil()  # it is the client's to make sense of
            return
        for event in events:
            for choice in event.choices:
                delta = choice.delta
                text = choice.text if delta is None else delta.content
                plain = delta is None or delta.is_plain
                finished = choice.finish_reason is not None
                self._journal.wrote(choice.index, choice.token_ids or (), text or "", finished, plain)
                if choice.logprobs is not None and choice.logprobs.tokens:
                    self._journal.place(choice.index, choice.logprobs.tokens)
            if not event.choices and event.usage is not None:
                self.usage_sent = True


def without_ids(data: bytes) -> bytes:
    """``data`` as it would be had nobody asked for token ids, in one pass over it: blocks may be long."""
    return _IDS.sub(_NO_IDS, data)


def _head(block: bytes) -> Head:
    """The head of the first event in ``block``."""
    try:
        return _read_head(block[len(_DATA) : block.find(END)])
    except msgspec.DecodeError:
        return Head()
