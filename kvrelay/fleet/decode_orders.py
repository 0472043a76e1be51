"""What a D is told of a request: which transfers bring pages, which of them it converts, where its own pages go. It
must never name transfers to a D whose store they do not go to."""

from __future__ import annotations

from kvrelay.errors import Unasked
from kvrelay.fleet.flight import DecodeOrder, Flight
from kvrelay.fleet.workers import Fleet, Handoff
from kvrelay.types import WorkerInfo


class DecodeOrders:
    """Writes them, from the fleet as it is now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __repr__(self) -> str:
        return f"<DecodeOrders in {self._fleet!r}>"

    def of(self, flight: Flight, now: float) -> DecodeOrder:
        """Where the request's D leg goes. Raises ``Unasked`` when that worker is gone."""
        member = self._fleet.workers.get(flight.decode.worker)
        if member is None:
            raise Unasked(f"worker {flight.decode.worker} is gone")
        # Pages went to the store of the D that was chosen first; elsewhere the transfers mean nothing.
        near = member.info.store == flight.aimed_at.store
        own_dtype = member.info.engine.fingerprint.format.dtype
        return DecodeOrder(
            worker=member.info.name,
            url=member.info.url,
            transfers=flight.transfers() if near else (),
            home=self._home(flight, member.info, now),
            # A D that takes over was not paired with P: whether it may convert is to be asked again.
            page_dtypes=flight.page_dtypes(own_dtype) if near and self._fleet.converts_kv_dtype else (),
            context_tokens=member.info.engine.max_model_len,
        )

    def _home(self, flight: Flight, decode: WorkerInfo, now: float) -> str | None:
        prefill = self._fleet.workers.get(flight.timeline.prefill_worker or "")
        way = self._fleet.pair(decode, prefill.info, now) if prefill else None
        return way.push_to if isinstance(way, Handoff) and not way.converts else None
