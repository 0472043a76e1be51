"""What requests lose with a worker that is silent or gone. It must never take a running stream from a worker that may
only be out of reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvrelay.fleet.flight import AbandonDecode, AbandonPrefill, Command, Flight, LegState
from kvrelay.fleet.membership import Missing
from kvrelay.fleet.prefix_waits import PrefixWaits


class Departures:
    """Ends the legs of requests on workers that left or fell silent."""

    def __init__(self, flights: Mapping[str, Flight], waits: PrefixWaits) -> None:
        self._flights = flights
        self._waits = waits

    def __repr__(self) -> str:
        return f"<Departures from {len(self._flights)} requests>"

    def gone(self, worker: str) -> list[Command]:
        """It has left, or another incarnation has its name: nothing runs there any more."""
        return list(self._left(worker, decode_too=True))

    def missing(self, missing: Missing) -> Iterator[Command]:
        """Time passed without a word of these."""
        for name in dict.fromkeys((*missing.silent, *missing.given_up)):
            # Silence is no proof of death: D's streams are left when they are silent, too (``Silences``). A prefill is
            # cheap to do elsewhere. At every tick: it may be sent there by a request that chose this worker earlier.
            yield from self._left(name, decode_too=False)

    def _left(self, worker: str, *, decode_too: bool) -> Iterator[Command]:
        for flight in self._flights.values():
            for leg in flight.legs:
                if leg.reservation is None or leg.reservation.worker != worker:
                    continue
                if leg.state is LegState.HELD:
                    self._waits.abandon(flight, leg)
                else:
                    yield AbandonPrefill(request_id=flight.request_id, index=leg.index)
            if decode_too and flight.decode.worker == worker:
                yield AbandonDecode(request_id=flight.request_id)
