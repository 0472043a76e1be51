"""Pages in and out of a store for scripts: these wait for the store's answer. A forward pass must not use them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kvrelay.errors import Lost
from kvrelay.protocol.client import Acquired, Held, NewPage
from kvrelay.store.arena import Arena
from kvrelay.store.copying import write_page
from kvrelay.types import PageName, SlotRef

ANSWER_S = 5.0
"""Longest wait for an answer."""

R = TypeVar("R")
NamedPayload = tuple[PageName, bytes | memoryview, int]
"""Name, bytes and valid tokens of a page."""


class Client(Protocol):
    """What is needed of a client."""

    def acquire(self, lease: str, names: Sequence[PageName], ttl_s: float) -> Future[Acquired]: ...
    def release(self, lease: str) -> None: ...
    def announce(self, pages: Sequence[NewPage]) -> None: ...
    def give_back(self, slots: Sequence[SlotRef]) -> None: ...
    def suspect(self, slots: Sequence[SlotRef]) -> None: ...
    def report(self, counts: dict[str, int]) -> None: ...


def wait(answer: Future[R]) -> R:
    """The answer. Raises ``Lost`` when the store is gone or does not give it in time."""
    try:
        return answer.result(ANSWER_S)
    except TimeoutError as error:
        raise Lost(f"the store did not answer within {ANSWER_S:g} s") from error


def put_pages(client: Client, arena: Arena, slots: list[SlotRef], pages: Sequence[NamedPayload]) -> None:
    """Write ``pages`` into ``slots`` and announce them. Raises ``Lost``, ``ValueError``; then nothing was stored."""
    try:
        for slot, (_name, payload, tokens) in zip(slots, pages, strict=True):
            write_page(arena, slot, payload, tokens)
    except (ValueError, Lost):
        client.give_back(slots)
        raise
    client.announce([NewPage(name, slot, tokens) for slot, (name, _, tokens) in zip(slots, pages, strict=True)])


def read_pages(client: Client, names: Sequence[PageName], read: Callable[[int, Held], R | None]) -> list[R | None]:
    """``read(position, page)`` for every page that is whole here, pinned meanwhile; what it finds bad is reported."""
    lease = f"get-{secrets.token_hex(8)}"
    held = wait(client.acquire(lease, names, ANSWER_S)).pages
    found: list[R | None] = []
    bad: list[SlotRef] = []
    try:
        for position, page in enumerate(held):
            whole = page if page is not None and page.complete else None
            found.append(None if whole is None else read(position, whole))
            if whole is not None and found[-1] is None:
                bad.append(whole.slot)
    finally:
        client.release(lease)
    if bad:
        client.report({"read_bad_checksum": len(bad)})
        client.suspect(bad)
    return found
