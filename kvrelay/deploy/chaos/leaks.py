"""What is still held when nobody asks for anything any more, as the metrics of all routers say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import aiohttp

from kvrelay.errors import Lost
from kvrelay.types import Value

ZERO = ("kvrelay_in_flight", "kvrelay_waiting", "kvrelay_prefill_queued_tokens", "kvrelay_decode_sequences",
        "kvrelay_decode_kv_tokens")  # fmt: skip
"""Gauges of the router that must be 0 at rest."""
ZERO_COUNTS = {
    "store": ("leases_open", "pages_pinned", "pages_filling", "transfers_open", "pushes_open", "slots_failed"),
    "worker": ("kv_blocks_used",),
}
"""The same for what stores and workers count themselves; of workers mock ones tell how many blocks requests hold."""
READS = 8
"""Routers that share a port take connections in turn, as chance will have it: of two, one is overlooked once in 128."""
_POLL_S = 0.2
_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_COUNT = re.compile(r"^kvrelay_(store|worker)_count$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Sample(Value, frozen=True):
    """One line of a router's metrics."""

    name: str
    labels: dict[str, str]
    value: float
    line: str


async def held(http: aiohttp.ClientSession, url: str, within_s: float) -> list[str]:
    """Metric lines that are not 0, and stay so for ``within_s``: a lease's time; and stores that lost slots."""
    end_s = asyncio.get_running_loop().time() + within_s
    while True:
        texts = [await _metrics(http, url) for _ in range(READS)]
        lines = list(dict.fromkeys(line for text in texts for line in _held(text)))
        if not lines or asyncio.get_running_loop().time() > end_s:
            return lines
        await asyncio.sleep(_POLL_S)


async def _metrics(http: aiohttp.ClientSession, url: str) -> str:
    """On a connection of its own: the next one may get to another router."""
    try:
        async with http.get(f"{url}/metrics", headers={"connection": "close"}) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Lost(f"{url}/metrics does not answer ({error}): whether anything is held is not known") from error


def _held(text: str) -> Iterator[str]:
    samples = [sample for line in text.splitlines() if (sample := _sample(line)) is not None]
    yield from (sample.line for sample in samples if sample.value and _is_zero_at_rest(sample))
    yield from _lost_slots(samples)


def _sample(line: str) -> Sample | None:
    match = _LINE.match(line)
    return match and Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3]), line)


def _is_zero_at_rest(sample: Sample) -> bool:
    kind = _COUNT.match(sample.name)
    return sample.labels.get("count") in ZERO_COUNTS[kind[1]] if kind else sample.name in ZERO


def _lost_slots(samples: list[Sample]) -> Iterator[str]:
    """What is neither an evictable page nor granted ahead is lost to everybody."""
    counts: dict[str, dict[str, float]] = {}
    for sample in samples:
        if sample.name == "kvrelay_store_count":
            counts.setdefault(sample.labels["store"], {})[sample.labels["count"]] = sample.value
    for store, count in counts.items():
        if "slots_occupied" in count:  # a mock store has names alone
            lost = count["slots_occupied"] - count["pages_used"] - count["slots_granted"] - count["slots_failed"]
            if lost:
                yield f"{store} lost {lost:g} slots"
