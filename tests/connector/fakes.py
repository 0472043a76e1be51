"""A store client and an engine request that tests hold in their hands; every message sent is kept."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvrelay.errors import Lost
from kvrelay.protocol.client import Acquired, Held, NewPage
from kvrelay.store.arena import Bools, Ints
from kvrelay.types import Engine, Fingerprint, PageFormat, PageName, SlotRef, Stage

PAGE = 32
BLOCK = 64
FORMAT = PageFormat(layers=2, kv_heads=1, head_dim=4, dtype="float32", page_tokens=PAGE)
ENGINE = Engine(
    fingerprint=Fingerprint(weights="w", weights_epoch=0, format=FORMAT, naming=3, engine="vllm 0"),
    kv_tokens=10 * BLOCK,
    block_tokens=BLOCK,
    max_model_len=512,
    max_batched_tokens=128,
)


@dataclass
class FakeArena:
    epoch: int = 7
    whole: bool = True
    """Whether the worker half filled what was planned."""
    gone: set[SlotRef] = field(default_factory=set)
    """Slots that were given away or given up."""

    def is_failed(self, ref: SlotRef) -> bool:
        return ref in self.gone

    def current(self, slots: Ints, generations: Ints) -> Bools:
        return np.array([SlotRef(int(slot), 1) not in self.gone for slot in slots])

    def ready_layers(self, slots: Ints, generations: Ints) -> Bools:
        return np.full((FORMAT.layers, len(slots)), self.whole)


@dataclass
class FakeRequest:
    """What the scheduler half reads of an engine's request."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    lora_request: object | None = None
    mm_features: Sequence[object] = ()
    prompt_embeds: object | None = None
    pooling_params: object | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens


@dataclass
class FakeClient:
    """Answers ``acquire`` from ``here`` and ``arriving``; hands out numbered slots while it has some."""

    here: set[PageName] = field(default_factory=set)
    arriving: set[PageName] = field(default_factory=set)
    live_transfers: set[str] = field(default_factory=set)
    slots_left: int = 1000
    arena: FakeArena | None = field(default_factory=FakeArena)
    answers: bool = True
    announced: list[NewPage] = field(default_factory=list)
    opened: list[tuple[str, int, str | None]] = field(default_factory=list)
    milestones: list[tuple[str, Stage]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    reports: list[dict[str, int]] = field(default_factory=list)
    suspected: list[SlotRef] = field(default_factory=list)
    acquired: int = 0
    _next_slot: int = 0

    def acquire(
        self, lease: str, names: Sequence[PageName], ttl_s: float, transfers: Sequence[str] = ()
    ) -> Future[Acquired]:
        self.acquired += 1
        answer: Future[Acquired] = Future()
        if self.arena is None:
            answer.set_exception(Lost("no store"))
        elif self.answers:
            pages = [self._held(name, index, len(names)) for index, name in enumerate(names)]
            waiting = None in pages and bool(self.live_transfers & set(transfers))
            answer.set_result(Acquired(id=1, pages=pages, waiting=waiting))
        return answer

    last_tokens: int = PAGE
    """Valid tokens of the last page asked for."""

    def _held(self, name: PageName, index: int, count: int) -> Held | None:
        if name not in self.here | self.arriving:
            return None
        tokens = self.last_tokens if index == count - 1 else PAGE
        return Held(slot=SlotRef(index, 1), tokens=tokens, complete=name in self.here)

    def take_slots(self, count: int) -> list[SlotRef]:
        taken = min(count, self.slots_left)
        self.slots_left -= taken
        first = self._next_slot
        self._next_slot += taken
        return [SlotRef(first + i, 1) for i in range(taken)]

    def announce(self, pages: Sequence[NewPage], transfer: str | None = None) -> None:
        self.announced += pages

    def open_transfer(
        self, transfer: str, names: Sequence[PageName], total_tokens: int, push_to: str | None, *, final: bool = False
    ) -> None:
        self.opened.append((transfer, total_tokens, push_to))

    def milestone(self, transfer: str, stage: Stage, *, reason: str = "", tokens: int = 0) -> None:
        self.milestones.append((transfer, stage))

    def release(self, lease: str) -> None:
        self.released.append(lease)

    def report(self, counts: dict[str, int]) -> None:
        self.reports.append(counts)

    def suspect(self, slots: Sequence[SlotRef]) -> None:
        self.suspected += slots
