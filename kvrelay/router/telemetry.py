"""Prometheus metrics. It must never be called from inside an algorithm: it reads finished timelines, and the brain at
scrape time."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.fleet.ledger import Timeline
from kvrelay.router.series import Series
from kvrelay.router.transfer_metrics import TransferMetrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Readings(Protocol):
    """Gauges and counts that are read when somebody scrapes."""

    def read(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        """Name, sentence, labels and value. Names ending in ``_total`` are counters."""
        ...


class Telemetry:
    """Metrics of one router, in a registry of their own."""

    def __init__(self, readings: Readings) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ReadingsCollector(readings))
        self._responses = self._counters("kvrelay_http_responses", "HTTP responses.", "route", "status")
        self._requests = self._counters("kvrelay_requests", "Finished requests by path.", "path", "status")
        self._local = self._counters("kvrelay_local_requests", "Requests served by one worker, by reason.", "reason")
        self._prompt_tokens = self._counter("kvrelay_prompt_tokens", "Prompt tokens of answered requests.")
        self._cached_tokens = self._counter("kvrelay_cached_tokens", "Prompt tokens that P had cached.")
        self._output_tokens = self._counter("kvrelay_output_tokens", "Tokens written.")
        self._ttft = self._histogram("kvrelay_ttft_seconds", "Request received to first event.")
        self._whole = self._histogram("kvrelay_request_seconds", "Request received to its end.")
        self._resumes = self._counters(
            "kvrelay_resumes", "Answers that lost their decode worker, by how.", "reason", "outcome"
        )
        self._strategies = self._counters(
            "kvrelay_resume_strategies", "Answers that another worker went on with, by what won.", "strategy"
        )
        self._pauses = self._histogram(
            "kvrelay_resume_pause_seconds", "Last piece before a loss to first piece after it."
        )
        self._transfers = TransferMetrics(self._registry)

    def __repr__(self) -> str:
        return "<Telemetry>"

    def _counter(self, name: str, sentence: str) -> Counter:
        return Counter(name, sentence, registry=self._registry)

    def _counters(self, name: str, sentence: str, *labels: str) -> Series[Counter]:
        return Series(Counter(name, sentence, labels, registry=self._registry))

    def _histogram(self, name: str, sentence: str) -> Histogram:
        return Histogram(name, sentence, buckets=_SECONDS, registry=self._registry)

    def responded(self, route: str, status: int) -> None:
        self._responses.of(route, str(status)).inc()

    def observe(self, timeline: Timeline) -> None:
        """Count a finished request."""
        self._requests.of(timeline.path, str(timeline.status)).inc()
        if timeline.local_reason:
            self._local.of(timeline.local_reason).inc()
        if timeline.status == HTTPStatus.OK:  # a refused prompt was not read
            self._prompt_tokens.inc(timeline.prompt_tokens)
            self._cached_tokens.inc(timeline.cached_tokens or 0)
        self._output_tokens.inc(timeline.output_tokens)
        self._whole.observe(timeline.events["finished"])
        if (first := timeline.events.get("first_token")) is not None:
            self._ttft.observe(first)
        for loss in timeline.resumptions:
            self._resumes.of(loss.reason, loss.outcome).inc()
            if loss.strategy and loss.outcome == "resumed":
                self._strategies.of(loss.strategy).inc()
            if loss.pause_s is not None:
                self._pauses.observe(loss.pause_s)
        self._transfers.observe(timeline)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self._transfers.settle()
        return generate_latest(self._registry)


class _ReadingsCollector(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, sentence, labels, value in self._readings.read():
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = kind(name.removesuffix("_total"), sentence, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
        yield from families.values()
