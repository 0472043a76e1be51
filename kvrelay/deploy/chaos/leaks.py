"""What is still held when nobody asks for anything any more, as the router's metrics say."""

from __future__ import annotations

import asyncio
import re

import aiohttp

from kvrelay.errors import Lost

ZERO = ("kvrelay_in_flight", "kvrelay_waiting", "kvrelay_prefill_queued_tokens", "kvrelay_decode_sequences",
        "kvrelay_decode_kv_tokens")  # fmt: skip
"""Gauges of the router that must be 0 at rest."""
ZERO_COUNTS = ("leases_open", "pages_pinned", "pages_filling", "transfers_open", "pushes_open")
"""The same for ``kvrelay_store_count``."""
_POLL_S = 0.2
_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


async def held(http: aiohttp.ClientSession, url: str, within_s: float) -> list[str]:
    """Metric lines that are not 0, and stay so for ``within_s``: a lease's time."""
    end_s = asyncio.get_running_loop().time() + within_s
    while True:
        lines = [line for line in (await _metrics(http, url)).splitlines() if _is_held(line)]
        if not lines or asyncio.get_running_loop().time() > end_s:
            return lines
        await asyncio.sleep(_POLL_S)


async def _metrics(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(f"{url}/metrics") as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Lost(f"{url}/metrics does not answer ({error}): whether anything is held is not known") from error


def _is_held(line: str) -> bool:
    match = _LINE.match(line)
    if match is None or float(match[3]) == 0:
        return False
    name, labels = match[1], match[2] or ""
    of_store = any(f'count="{count}"' in labels for count in ZERO_COUNTS)
    return name in ZERO or (name == "kvrelay_store_count" and of_store)
