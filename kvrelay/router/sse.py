"""Server-sent events as bytes: cut into whole events, never parsed, except for the one number that the router knows
better than D. No I/O happens here."""

from __future__ import annotations

import re

import msgspec

from kvrelay.errors import Malformed
from kvrelay.router.failures import error_body

END = b"\n\n"
DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 64 << 20
"""Longest event: an echoed prompt of the longest body, with log probabilities."""

# A quote inside generated text is escaped in JSON, so these keys are never found inside a string.
DETAILS = b'"prompt_tokens_details"'
_CACHED = re.compile(rb'("prompt_tokens_details"\s*:\s*\{[^{}]*?"cached_tokens"\s*:\s*)(?:\d+|null)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_ROLE = b'"delta":{"role":'
"""In a chat's first event of each choice, which carries no token."""
_NO_CHOICE = b'"choices":[]'
"""In an event that carries the usage alone."""
_ERROR = b'"error"'
_ERROR_STARTS = (b'data: {"error"', b'data: {"object":"error"')


class EventSplitter:
    """Collects bytes and gives out whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def __repr__(self) -> str:
        return f"<EventSplitter {len(self._rest)} bytes of an unfinished event>"

    @property
    def is_empty(self) -> bool:
        """Nothing of an event is here."""
        return not self._rest

    def feed(self, data: bytes) -> bytes:
        """The whole events received so far, joined; may be empty. Raises ``Malformed``."""
        buffer = self._rest + data if self._rest else data
        end = buffer.rfind(END)
        if end < 0:
            self._rest = buffer
            if len(buffer) > MAX_EVENT_BYTES:
                raise Malformed(
                    f"a stream event is longer than {MAX_EVENT_BYTES} bytes; ask for fewer log probabilities"
                )
            return b""
        end += len(END)
        self._rest = buffer[end:]
        return buffer[:end]


def with_cached_tokens(data: bytes, cached_tokens: int | None) -> bytes:
    """``data`` (JSON or events) with ``usage.prompt_tokens_details.cached_tokens`` replaced, where there is one."""
    if cached_tokens is None:
        return data
    return _CACHED.sub(lambda match: match[1] + str(cached_tokens).encode(), data)


def completion_tokens(data: bytes) -> int | None:
    """``usage.completion_tokens`` in ``data``, if it is there."""
    found = _COMPLETION_TOKENS.findall(data)
    return int(found[-1]) if found else None


def token_events(block: bytes) -> int:
    """How many events of ``block`` carry a token; the last of an answer may carry one that has no text."""
    return block.count(END) - block.count(DONE) - block.count(_ROLE) - block.count(_NO_CHOICE)


def error_status(block: bytes) -> int | None:
    """Status inside ``block`` when its first event is an error."""
    if not block.startswith(_ERROR_STARTS):
        return None
    try:
        event = msgspec.json.decode(block[len(b"data: ") : block.index(END)], type=_ErrorEvent)
    except msgspec.DecodeError:
        return 500
    return event.error.code if isinstance(event.error.code, int) else 500


def error_json(block: bytes) -> bytes:
    """The JSON of ``block``'s first event."""
    return block[len(b"data: ") : block.index(END)]


def has_error(block: bytes) -> bool:
    """Whether any event of ``block`` is an error."""
    if _ERROR not in block:  # nearly always: this is asked of every block
        return False
    return block.startswith(_ERROR_STARTS) or any(END + start in block for start in _ERROR_STARTS)


def error_event(message: str, status: int) -> bytes:
    """An event that tells a client in mid-stream that its answer is incomplete."""
    return b"data: " + error_body(message, status) + END


class _ErrorDetail(msgspec.Struct):
    code: object = None


class _ErrorEvent(msgspec.Struct):
    error: _ErrorDetail
