"""One client request: its JSON checked as far as routing needs it. Everything else is the worker's to judge."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

import msgspec

from kvrelay.errors import BadRequest
from kvrelay.router.constraints import check_constraints
from kvrelay.router.extent import check_extent
from kvrelay.router.strip import CONTAINERS, strip_reserved

MAX_CHOICES = 1024
MAX_DEPTH = 100
"""Levels of objects and lists in a body. A tool's schema has ten or twenty; Python's own recursion ends at 1,000."""
_MAX_TOKEN_ID = 2**32 - 1
_COMPLETION_TOKENS = 16
"""OpenAI's default ``max_tokens`` of a completion; a chat may fill the context."""

T = TypeVar("T")


class Kind(StrEnum):
    """Which API was called."""

    COMPLETION = "completion"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Kind.CHAT else "/v1/completions"


@dataclass(frozen=True)
class ClientRequest:
    """A body without reserved fields, and the fields that the router acts on."""

    kind: Kind
    body: dict[str, object]
    model: str | None
    stream: bool
    choices: int
    max_tokens: int | None

    def has(self, key: str) -> bool:
        """``key`` is set to something that is not null, false or empty."""
        return bool(self.body.get(key))

    @cached_property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts of a completion, as texts or as token ids. Raises ``BadRequest``."""
        return _prompts(self.body.get("prompt"))

    def room_tokens(self, prompt_tokens: int, context_tokens: int, default_tokens: int | None = None) -> int:
        """Most tokens that one choice may write; ``default_tokens``: of a chat that does not say, by its model."""
        chat = context_tokens if default_tokens is None else default_tokens
        default = _COMPLETION_TOKENS if self.kind is Kind.COMPLETION else chat
        asked = default if self.max_tokens is None else self.max_tokens
        return max(0, min(asked, context_tokens - prompt_tokens))


def parse(kind: Kind, data: bytes) -> ClientRequest:
    """The request in ``data``. Raises ``BadRequest``."""
    check_extent(data)
    body = _decode(data)
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _deeper_than(MAX_DEPTH, body):
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep; flatten it")
    body = strip_reserved(body)
    if kind is Kind.CHAT and not isinstance(body.get("messages"), list):
        raise BadRequest("messages must be a list of messages", param="messages")
    check_constraints(body)
    limit = body.get("max_completion_tokens")
    return ClientRequest(
        kind=kind,
        body=body,
        model=_typed(body, "model", str, "a string"),
        stream=_typed(body, "stream", bool, "true or false") or False,
        choices=_choices(body),
        max_tokens=_typed(body, "max_completion_tokens" if limit is not None else "max_tokens", int, "an integer"),
    )


def _decode(data: bytes) -> dict[str, object]:
    if not data.strip():
        raise BadRequest("the body is empty; send a JSON object")
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body is not a JSON object that can be read ({error}); correct it") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON ({error}); correct it") from error


def _deeper_than(depth: int, value: object) -> bool:
    """Level by level: whatever walks the body later may do so by recursion."""
    level = [value]
    for _ in range(depth):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return False
    return True


def _containers(value: object) -> list[object]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    # Looking at the types first is five times faster for long lists of token ids.
    return [item for item in items if type(item) in CONTAINERS] if CONTAINERS & set(map(type, items)) else []


def _typed(body: dict[str, object], key: str, kind: type[T], want: str) -> T | None:
    value = body.get(key)
    # bool is an int to Python, but not to JSON.
    if value is None or type(value) is kind:
        return value
    raise BadRequest(f"{key} must be {want}", param=key)


def _choices(body: dict[str, object]) -> int:
    choices = _typed(body, "n", int, "an integer")
    if choices is None:
        return 1
    if not 1 <= choices <= MAX_CHOICES:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES}", param="n")
    return choices


def _prompts(prompt: object) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if _all(prompt, int):
            return [_checked(prompt)]
        if _all(prompt, str):
            return prompt
        if all(isinstance(item, list) and _all(item, int) for item in prompt):
            return [_checked(item) for item in prompt]
    raise BadRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of those", param="prompt"
    )


def _all(items: list[object], kind: type) -> bool:
    return set(map(type, items)) == {kind}


def _checked(ids: list[int]) -> list[int]:
    if min(ids) < 0 or max(ids) > _MAX_TOKEN_ID:
        raise BadRequest(f"token ids in prompt must be between 0 and {_MAX_TOKEN_ID}", param="prompt")
    return ids
