"""The two ways on for a stream that lost its decode worker, each by itself: pages that are found, and none at all."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.breaking.bench import Bench, bench
from benchmarks.breaking.loss import Loss, table

PROMPT_TOKENS = 3000
ANSWER_TOKENS = 120
BEGUN_TOKENS = 20
DEEDS: dict[str, dict[str, bool]] = {"killed": {"dead": True}, "stopped": {"hang": True}}
OTHERS = ("prefill-0", "prefill-1", "store-0", "store-1")


async def paths(quick: bool) -> dict[str, Any]:
    """One stream loses its decode worker, while its pages lie in a store, or nowhere."""
    figures: dict[str, Any] = {}
    for path in ("restore", "re_prefill"):
        figures[path] = {}
        for deed, fault in DEEDS.items():
            async with bench((2, 2), time_scale=3.0) as site:
                rounds = range(2 if quick else 4)
                losses = [await _lose(site, fault, nowhere=path == "re_prefill") for _ in rounds]
            figures[path][deed] = table(losses, restored=path == "restore")
    return figures


async def _lose(site: Bench, fault: dict[str, bool], *, nowhere: bool) -> Loss:
    ttft_s = (await site.clients.stream(site.clients.prompt(PROMPT_TOKENS), 1)).first_token_s
    prompt = site.clients.prompt(PROMPT_TOKENS)
    stream, reading = await site.clients.begun(prompt, ANSWER_TOKENS, BEGUN_TOKENS)
    if nowhere:
        await _empty(site)
    worker = (await site.clients.timeline(stream))["decode_worker"]
    hurt_s = time.monotonic()
    await site.suffer(worker, **fault)
    await reading
    await site.suffer(worker)
    await site.clients.until("kvrelay_worker_ready", 4)
    right = await site.clients.stream(prompt, ANSWER_TOKENS)
    return Loss.of(stream, prompt_tokens=PROMPT_TOKENS, hurt_s=hurt_s, ttft_s=ttft_s, right=right)


async def _empty(site: Bench) -> None:
    """Every cache but that of the decode workers is lost; the other decode worker never had the prompt."""
    await site.suffer(*OTHERS, dead=True)
    await site.suffer(*OTHERS)
    await site.clients.until("kvrelay_worker_ready", 4)
    await site.clients.until("kvrelay_store_ready", 2)
