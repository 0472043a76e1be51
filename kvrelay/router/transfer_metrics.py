"""Prometheus metrics of hand-offs. It reads the records of requests that are over, each once: those of hand-offs that
outlast their request when they are over as well."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvrelay.fleet.ledger import KEPT_REQUESTS, Timeline
from kvrelay.fleet.record import TransferRecord
from kvrelay.router.series import Series

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Finer at the short end than those of requests: a hand-off that is hidden well exposes milliseconds."""


class TransferMetrics:
    """Sums and distributions over transfers, by the transport that brought their bytes.

    Speed is a quotient of two counters, bytes over moving seconds: over any span, and with equal weight for all bytes.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._outlasting: dict[str, Timeline] = {}
        """Requests that are over, by their transfers that are not."""
        self._transfers = self._counters("kvrelay_transfers", "Transfers by what became of them.", "outcome")
        self._retries = Counter(
            "kvrelay_transfer_retries", "Transfers begun again, at another P or otherwise.", registry=registry
        )
        self._bytes = self._counters("kvrelay_transfer_bytes", "Bytes that crossed between stores.", "transport")
        self._late_bytes = self._counters(
            "kvrelay_transfer_late_bytes", "Bytes that were still to cross when the prefill ended.", "transport"
        )
        self._pages = self._counters("kvrelay_transfer_pages", "Pages that crossed between stores.", "transport")
        self._runs = self._counters(
            "kvrelay_transfer_runs", "Pieces of memory without a gap that the bytes were received in.", "transport"
        )
        self._moving = self._counters(
            "kvrelay_transfer_moving_seconds", "Time with bytes on their way between stores.", "transport"
        )
        self._hidden = self._histograms("kvrelay_transfer_hidden_seconds", "Hand-off beside the prefill.", "transport")
        self._exposed = self._histograms(
            "kvrelay_transfer_exposed_seconds", "Hand-off that the prefill did not hide.", "transport"
        )

    def __repr__(self) -> str:
        return f"<TransferMetrics, {len(self._outlasting)} transfers outlast their requests>"

    def _counters(self, name: str, sentence: str, *labels: str) -> Series[Counter]:
        return Series(Counter(name, sentence, labels, registry=self._registry))

    def _histograms(self, name: str, sentence: str, *labels: str) -> Series[Histogram]:
        return Series(Histogram(name, sentence, labels, buckets=_SECONDS, registry=self._registry))

    def observe(self, timeline: Timeline) -> None:
        """Count the transfers of a request that is over, or have ``settle`` count them."""
        for transfer, record in timeline.transfers.items():
            self._retries.inc(record.attempt > 0)
            if record.is_settled:
                self._count(record)
            else:
                self._outlasting[transfer] = timeline
        while len(self._outlasting) > KEPT_REQUESTS:  # the ledger knows it no more, so nothing will be heard of it
            transfer = next(iter(self._outlasting))
            self._count(self._outlasting.pop(transfer).transfers[transfer])

    def settle(self) -> None:
        """Count those that were waited for and are over by now."""
        records = [timeline.transfers[transfer] for transfer, timeline in self._outlasting.items()]
        for record in records:
            if record.is_settled:
                del self._outlasting[record.transfer]
                self._count(record)

    def _count(self, record: TransferRecord) -> None:
        self._transfers.of(record.outcome).inc()
        self._retries.inc(record.restarts)
        way = record.transport.value
        self._bytes.of(way).inc(record.bytes)
        self._late_bytes.of(way).inc(record.late_bytes)
        self._pages.of(way).inc(record.pages)
        self._runs.of(way).inc(record.runs)
        self._moving.of(way).inc(record.moving_s)
        if record.hidden_s is not None:
            self._hidden.of(way).observe(record.hidden_s)
        if record.exposed_s is not None:
            self._exposed.of(way).observe(record.exposed_s)
