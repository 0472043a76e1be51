"""What a new request can load: one question to the node's store, asked in the background, used once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from kvrelay.errors import KvrelayError
from kvrelay.protocol import Acquired, Held
from kvrelay.store.client import StoreClient
from kvrelay.types import PageName

LEASE_S = 60.0
"""Pins outlive the longest load: its deadline counts from its last progress, not from its start."""
GRACE_S = 0.005
"""The scheduler waits once for so long per request. An answer takes about 0.3 ms; without the wait, a request
that arrives while another computes would lose a whole step (up to seconds on a CPU)."""
RETRY_S = 0.01
"""Pause before the store is asked again while a transfer has not announced all pages."""


class Lookup:
    """The search for one request's pages, from arrival to admission."""

    def __init__(
        self,
        client: StoreClient,
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
        self._transfers = transfers
        self._wait_s = wait_s
        self._pages: list[Held | None] = []
        self._waiting = False
        self._asked_once = False
        self._asked_at = now
        self._born_at = now
        self._progress_at = now
        self._answer: Future[Acquired] | None = None
        self._ask(now)

    def __repr__(self) -> str:
        state = "asking" if self._answer is not None else "waiting" if self._waiting else "settled"
        return f"<Lookup {state}, {self._found()} of {len(self.names)} pages>"

    def settled(self, now: float) -> bool:
        """Whether the answer is final. Asks again while a transfer may bring what is missing, until it stalls."""
        stale = now >= self._asked_at + LEASE_S / 2
        if self._answer is None and (stale or (self._waiting and now >= self._asked_at + RETRY_S)):
            self._ask(now)
        if self._answer is not None:
            self._read_answer(now)
        if self._answer is not None:
            return self._stalled(now)
        return not self._waiting or self._stalled(now)

    def usable(self) -> list[Held]:
        """The pages that can be loaded: those before the first miss, arriving ones only with a transfer."""
        run: list[Held] = []
        for page in self._pages:
            if page is None or not (page.complete or self._transfers):
                break
            run.append(page)
        return run

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

    def _read_answer(self, now: float) -> None:
        assert self._answer is not None
        try:
            answer = self._answer.result(timeout=0 if self._asked_once else GRACE_S)
        except FutureTimeout:
            self._asked_once = True
            return
        except KvrelayError:
            # No store: pass through. The request is computed here.
            self._answer, self._waiting, self._pages = None, False, []
            return
        before = self._found()
        self._asked_once, self._answer = True, None
        self._pages, self._waiting = answer.pages, answer.waiting
        if self._found() > before:
            self._progress_at = now

    def _found(self) -> int:
        return sum(page is not None for page in self._pages)

    def _stalled(self, now: float) -> bool:
        return now - self._progress_at > self._wait_s
