"""Transfers of requests: what the router wrote of each, and what the node's store is told as the engine's steps go on.

It decides nothing, and asks for no answer.
"""

from __future__ import annotations

import logging

from kvrelay.connector.engine import EngineRequest
from kvrelay.connector.lookup import Lookup, Shortfall
from kvrelay.connector.tracked import Tracked
from kvrelay.errors import Malformed
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg, read_handoff
from kvrelay.store.client import StoreClient
from kvrelay.types import Stage

logger = logging.getLogger(__name__)


class Handoffs:
    """Transfers of all requests; each milestone is told once."""

    def __init__(self, client: StoreClient, page_tokens: int) -> None:
        self._client = client
        self._page_tokens = page_tokens

    def __repr__(self) -> str:
        return f"<Handoffs told to {self._client!r}>"

    def read(self, request: EngineRequest) -> PrefillLeg | DecodeLeg | None:
        """The leg that the router wrote into ``request``; None without one, or with one that is not ours."""
        try:
            return read_handoff(request.kv_transfer_params)
        except Malformed as error:
            logger.warning("ignoring a hand-off that is not ours: %s", error)
            self._client.report({"handoffs_malformed": 1})
            return None

    def searched(self, lookup: Lookup) -> None:
        """What ``lookup`` found is used: pages that a transfer was to bring and that lack are computed here."""
        match lookup.shortfall:
            case Shortfall.UNHEARD:
                self._client.report({"handoffs_unheard": 1})
            case Shortfall.OVER:
                self._client.report({"handoffs_incomplete": 1})

    def begun(self, request: EngineRequest, tracked: Tracked) -> None:
        """The engine scheduled a chunk of ``request``."""
        transfer = tracked.saves.transfer
        if transfer is not None and not tracked.prefill_started:
            tracked.prefill_started = True
            self._client.milestone(transfer, Stage.STARTED, tokens=request.num_prompt_tokens)

    def scheduled(self, request: EngineRequest, tracked: Tracked, computed: int) -> None:
        """``computed`` tokens will be, once the step that is being planned is over."""
        transfer = tracked.saves.transfer
        if transfer is not None and not tracked.last_chunk_seen and computed >= request.num_prompt_tokens:
            tracked.last_chunk_seen = True
            self._client.milestone(transfer, Stage.LAST_CHUNK, tokens=request.num_prompt_tokens)

    def loaded(self, tracked: Tracked, tokens: int) -> None:
        """``tokens`` of the request were loaded."""
        for transfer in tracked.transfers:
            self._client.milestone(transfer, Stage.LOADED, tokens=tokens)

    def closed(self, request: EngineRequest, tracked: Tracked) -> None:
        """The request ended: unless every page of its prompt was saved, its transfer failed."""
        if not tracked.saves.prompt_saved(request.num_prompt_tokens):
            self.broken(tracked, "the prefill ended before all its pages were saved")

    def broken(self, tracked: Tracked, reason: str) -> None:
        """Nothing more will be saved for the request's transfer."""
        if tracked.saves.transfer is not None:
            self._client.milestone(tracked.saves.transfer, Stage.FAILED, reason=reason)

    def send_home(self, request: EngineRequest, tracked: Tracked) -> None:
        """Push what this engine generated to the node of the next turn's prefill, which has the prompt's pages."""
        if tracked.home is None:
            return
        names = tracked.saves.saved_names()[request.num_prompt_tokens // self._page_tokens :]
        if names:
            transfer = f"{request.request_id}/home"
            self._client.open_transfer(transfer, names, len(names) * self._page_tokens, tracked.home, final=True)
