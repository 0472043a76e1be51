"""What a new request can load: one question to the node's store, asked in the background, used once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum

from kvrelay.connector.grace import GRACE_S, Grace
from kvrelay.errors import KvrelayError
from kvrelay.protocol.client import Acquired, Held
from kvrelay.store.client import StoreClient
from kvrelay.types import PageName

LEASE_S = 60.0
"""Pins outlive the longest load: its deadline counts from its last progress, not from its start."""
RETRY_S = 0.01
"""Pause before the store is asked again while a transfer has not announced all pages."""


class Shortfall(Enum):
    """Why a hand-off did not bring all pages of its prompt."""

    UNHEARD = "unheard"
    """The store heard nothing of it, or nothing more, for as long as is waited."""
    OVER = "over"
    """It failed, its pages went again, or it is that of another prompt."""


class Lookup:
    """The search for one request's pages, from arrival to admission."""

    def __init__(
        self,
        client: StoreClient,
        grace: Grace,
        lease: str,
        names: Sequence[PageName],
        transfers: list[str],
        *,
        now: float,
        wait_s: float,
    ) -> None:
        self.lease = lease
        self.names = list(names)
        self._client = client
        self._grace = grace
        self._transfers = transfers
        self._wait_s = wait_s
        self._pages: list[Held | None] = []
        self._waiting = False
        self._asked_at = now
        self._born_at = now
        self._polled_at = -RETRY_S - 1
        self._progress_at = -1.0
        """When pages were last added, counted from the first look; before it, negative."""
        self._answer: Future[Acquired] | None = None
        self._ask(now)

    def __repr__(self) -> str:
        state = "asking" if self._answer is not None else "waiting" if self._waiting else "settled"
        return f"<Lookup {state}, {self._found()} of {len(self.names)} pages>"

    def settled(self, now: float) -> bool:
        """Whether the answer is final. Asks again while a transfer may bring what is missing, until it stalls."""
        # Between two polls lies a step of the engine, up to seconds: an answer from before it is only a start.
        grace_s = GRACE_S if self._grace.is_idle or now - self._polled_at > RETRY_S else 0.0
        self._polled_at = now
        self._read_answer(now, grace_s)
        if self._answer is None and self._is_outdated(now):
            self._ask(now)
            self._read_answer(now, grace_s)
        if self._answer is not None:
            return now - self._asked_at > self._wait_s
        return not self._waiting or now - self._progress_at > self._wait_s

    def _is_outdated(self, now: float) -> bool:
        age_s = now - self._asked_at
        return age_s >= LEASE_S / 2 or (self._waiting and age_s >= RETRY_S)

    def usable(self) -> list[Held]:
        """The pages that can be loaded: those before the first miss, arriving ones only with a transfer."""
        run: list[Held] = []
        for page in self._pages:
            if page is None or not (page.complete or self._transfers):
                break
            run.append(page)
        return run

    @property
    def shortfall(self) -> Shortfall | None:
        """Once settled: why pages lack that a transfer was to bring; None when none lacks, or none was to come."""
        if not self._transfers or self._found() == len(self.names):
            return None
        return Shortfall.UNHEARD if self._waiting else Shortfall.OVER

    def present(self) -> set[int]:
        """Positions among ``names`` that the store has complete, wherever they are."""
        return {i for i, page in enumerate(self._pages) if page is not None and page.complete}

    def age_s(self, now: float) -> float:
        """Seconds since the request arrived or came back."""
        return now - self._born_at

    def release(self) -> None:
        """Give the pins back; the pages may be evicted from now on."""
        self._client.release(self.lease)

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._answer = self._client.acquire(self.lease, self.names, LEASE_S, self._transfers)

    def _read_answer(self, now: float, grace_s: float) -> None:
        if self._answer is None:
            return
        try:
            answer = self._grace.wait(self._answer, grace_s)
        except KvrelayError:
            # No store: pass through. The request is computed here.
            self._answer, self._waiting, self._pages = None, False, []
            return
        if answer is None:
            return
        first, before = self._progress_at < 0, self._found()
        self._answer, self._pages, self._waiting = None, answer.pages, answer.waiting
        if first or self._found() > before:
            self._progress_at = now

    def _found(self) -> int:
        return sum(page is not None for page in self._pages)
