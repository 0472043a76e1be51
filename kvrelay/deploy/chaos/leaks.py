"""What is still held when nobody asks for anything any more, as the metrics of all routers say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvrelay.errors import Lost

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
_COUNT = re.compile(r"^kvrelay_(store|worker)_count$")


async def held(http: aiohttp.ClientSession, url: str, within_s: float) -> list[str]:
    """Samples that are not 0, and stay so for ``within_s``: a lease's time; and stores that lost slots."""
    end_s = asyncio.get_running_loop().time() + within_s
    while True:
        reads = [await _metrics(http, url) for _ in range(READS)]
        told = list(dict.fromkeys(each for samples in reads for each in _held(samples)))
        if not told or asyncio.get_running_loop().time() > end_s:
            return told
        await asyncio.sleep(_POLL_S)


async def _metrics(http: aiohttp.ClientSession, url: str) -> list[Sample]:
    """On a connection of its own: the next one may get to another router."""
    try:
        async with http.get(f"{url}/metrics", headers={"connection": "close"}) as response:
            return _samples(await response.text())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Lost(f"{url}/metrics gives no metrics ({error}): whether anything is held is not known") from error


def _samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _held(samples: list[Sample]) -> Iterator[str]:
    for sample in samples:
        if sample.value and _is_zero_at_rest(sample):
            yield f"{sample.name}{sample.labels} {sample.value:g}"
    yield from _lost_slots(samples)


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
