"""Which pages of a request are still to be written to the store, and in which step. It never waits for a slot."""

from __future__ import annotations

from kvrelay import identity
from kvrelay.connector.engine import EngineRequest
from kvrelay.connector.fresh import FreshPages
from kvrelay.connector.plan import PageCopy, SaveJob
from kvrelay.protocol.client import NewPage
from kvrelay.store.client import StoreClient
from kvrelay.types import PageName


class SaveProgress:
    """One request's pages: named as tokens become known, planned once their last token is computed.

    Pages that the engine found in its own prefix cache never pass through a forward; they are planned
    with the request's first step like all pages that lie below it.
    """

    def __init__(self, root: PageName, page_tokens: int, transfer: str | None, writers: int = 1) -> None:
        """``writers``: ranks of the engine that write each page together."""
        self.transfer = transfer
        self._writers = writers
        self._root = root
        self._page_tokens = page_tokens
        self._names: list[PageName] = []
        self._done = 0
        """Leading full pages that are planned or in the store."""
        self._present: set[int] = set()
        self._tail_done = False
        self._stopped = False
        self._short = 0
        """Most pages that found no slot in one step: those already counted."""

    def __repr__(self) -> str:
        return f"<SaveProgress {self._done} of {len(self._names)} pages, tail {'done' if self._tail_done else 'open'}>"

    def names(self, tokens: EngineRequest) -> list[PageName]:
        """Names of all pages of the request's tokens, the partial last one included."""
        ids = tokens.all_token_ids
        identity.extend_names(self._names, self._root, ids, self._page_tokens)
        rest = ids[len(self._names) * self._page_tokens :]
        if not len(rest):
            return list(self._names)
        return [*self._names, self._tail_name(list(rest))]

    def _tail_name(self, rest: list[int]) -> PageName:
        return identity.page_name(self._names[-1] if self._names else self._root, identity.token_bytes(rest))

    def mark_present(self, pages: set[int], total_tokens: int) -> None:
        """The store holds these pages (by position); the tail of ``total_tokens`` may be among them."""
        self._present |= pages
        full, rest = divmod(total_tokens, self._page_tokens)
        if rest and full in pages:
            self._tail_done = True
            self._present.discard(full)

    def forget_from(self, position: int) -> None:
        """Pages that reach past ``position`` turned out unusable and are computed anew: save them again."""
        first = position // self._page_tokens
        self._present = {page for page in self._present if page < first}
        self._done = min(self._done, first)
        self._tail_done = False

    def stop(self) -> None:
        """Save nothing from here on: what follows builds on converted KV, and a name promises exact pages."""
        self._stopped = True

    def saved_names(self) -> list[PageName]:
        """Names of the leading full pages that were planned or are in the store."""
        return self._names[: self._done]

    def prompt_saved(self, prompt_tokens: int) -> bool:
        """Whether every page of the prompt was planned or is in the store."""
        full, rest = divmod(prompt_tokens, self._page_tokens)
        return self._done >= full and (self._tail_done or not rest)

    def plan(
        self, request: EngineRequest, blocks: list[int], computed: int, client: StoreClient, fresh: FreshPages
    ) -> tuple[SaveJob | None, list[NewPage], int]:
        """Plan what is complete once positions below ``computed`` are, but for what is ``fresh`` of another request.

        Returns the job, the announcements that go with it, and how many more pages than ever found no free slot.
        """
        if self._stopped:
            return None, [], 0
        ids = request.all_token_ids
        known = min(computed, len(ids))
        identity.extend_names(self._names, self._root, ids, self._page_tokens)
        wanted = self._without_fresh(self._due(request, known), fresh)
        slots = client.take_slots(len(wanted)) if wanted else []
        copies, announced = [], []
        for (name, start, tokens), slot in zip(wanted, slots, strict=False):
            copies.append(PageCopy(slot.slot, slot.generation, start, tokens))
            announced.append(NewPage(name, slot, tokens, self._parent(start), self._writers))
            fresh.add(name, slot)
            self._mark_planned(start, tokens)
        self._skip_present()
        job = SaveJob(request.request_id, blocks, copies) if copies else None
        counted, self._short = self._short, max(self._short, len(wanted) - len(slots))
        return job, announced, self._short - counted

    def _without_fresh(
        self, due: list[tuple[PageName, int, int]], fresh: FreshPages
    ) -> list[tuple[PageName, int, int]]:
        wanted = []
        for name, start, tokens in due:
            if fresh.has(name):
                self._mark_planned(start, tokens)
            else:
                wanted.append((name, start, tokens))
        return wanted

    def _due(self, request: EngineRequest, known: int) -> list[tuple[PageName, int, int]]:
        size = self._page_tokens
        self._skip_present()
        due = [
            (self._names[page], page * size, size)
            for page in range(self._done, known // size)
            if page not in self._present
        ]
        full, rest = divmod(request.num_prompt_tokens, size)
        if rest and not self._tail_done and known >= request.num_prompt_tokens:
            tail = list(request.all_token_ids[full * size : request.num_prompt_tokens])
            parent = self._parent(full * size) or self._root
            due.append((identity.page_name(parent, identity.token_bytes(tail)), full * size, rest))
        return due

    def _parent(self, start: int) -> PageName | None:
        """Name of the page before the one that begins at ``start``."""
        return self._names[start // self._page_tokens - 1] if start else None

    def _mark_planned(self, start: int, tokens: int) -> None:
        if tokens < self._page_tokens:
            self._tail_done = True
        else:
            self._present.add(start // self._page_tokens)

    def _skip_present(self) -> None:
        while self._done in self._present:
            self._present.discard(self._done)
            self._done += 1
