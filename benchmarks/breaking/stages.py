"""The stages: each breaks one thing and takes the time. It must never count an answer that differs as recovered."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.breaking.asking import Stream
from benchmarks.breaking.bench import Bench, bench
from benchmarks.breaking.drained import drained
from benchmarks.breaking.loss import spread
from benchmarks.breaking.paths import paths
from benchmarks.breaking.real import engines
from benchmarks.breaking.replay import replay
from benchmarks.breaking.underway import partitions, restarts
from kvrelay.cli.draining import Routers
from kvrelay.deploy.chaos.run import ChaosPlan, wreak
from kvrelay.errors import Lost

STREAMS = 8
PROMPT_TOKENS = 3000
ANSWER_TOKENS = 100
COPIES_MADE = 'kvrelay_copies_total{ending="made"}'


async def chaos(quick: bool) -> dict[str, Any]:
    """Everything that mock workers and clients can suffer, at random moments, with 2,000 streams on 32 workers.

    A token of a stream comes every 2.5 seconds: with their clients, 800 tokens a second are what two cores bear. A step
    that is as long computes more of prompts than usual, so that nobody queues for it who would not elsewhere.
    """
    streams, events = (400, 60) if quick else (2000, 500)
    plan = ChaosPlan(
        events=events, streams=streams, seed=2026, ramp_s=streams / 125, every_s=0.15, hung_s=60.0,
        questions=48, words=(20, 300), tokens=(60, 120),
    )  # fmt: skip
    async with bench((16, 16), time_scale=1.0, step_tokens=4096) as site:
        site.victims.step_s = 2.5
        began = time.monotonic()
        outcome = await wreak(site.http, site.cluster.url, site.victims, plan)
        seconds = round(time.monotonic() - began, 1)
    return {
        "workers": 32,
        "streams": plan.streams,
        "streams_at_events": outcome.streams,
        "events": sum(outcome.deeds.values()),
        "seconds": seconds,
        "deeds": outcome.deeds,
        "verdicts": outcome.verdicts,
        "causes": outcome.causes,
        "longest_pause_s": outcome.longest_pause_s,
        "late_s": outcome.late_s,
        "held": outcome.held,
        "failures": outcome.failures,
    }


async def decode(quick: bool) -> dict[str, Any]:
    """A decode worker is killed, or stands still, with 8 streams running."""
    figures: dict[str, Any] = {}
    for deed, fault in (("killed", {"dead": True}), ("stopped", {"hang": True})):
        equal, pauses, usual = 0, [], []
        async with bench((2, 2), time_scale=3.0) as site:
            for _ in range(2 if quick else 5):
                prompts = [site.clients.prompt(PROMPT_TOKENS) for _ in range(STREAMS)]
                streams = [Stream() for _ in prompts]
                running = [
                    asyncio.create_task(site.clients.stream(each, ANSWER_TOKENS, stream))
                    for each, stream in zip(prompts, streams, strict=True)
                ]
                while min(len(stream.tokens) for stream in streams) < 20:
                    await asyncio.sleep(0.01)
                await site.suffer("decode-0", **fault)
                await asyncio.gather(*running)
                await site.suffer("decode-0")
                moved = [stream for stream in streams if "resumptions" in stream.timeline]
                pauses += [stream.longest_pause_s for stream in moved]
                await site.clients.until("kvrelay_worker_ready", 4)
                # Not before: their pages would be in every cache.
                undisturbed = await asyncio.gather(*(site.clients.stream(each, ANSWER_TOKENS) for each in prompts))
                usual += [each.longest_pause_s for each in undisturbed]
                equal += sum(
                    now.is_whole and now.tokens == right.tokens for now, right in zip(streams, undisturbed, strict=True)
                )
        figures[deed] = {
            "streams": len(usual),
            "completed_equal": equal,
            "moved": len(pauses),
            "longest_pause_s": spread(pauses),
            "longest_pause_without_s": spread(usual),
        }
    return figures


async def prefill(quick: bool) -> dict[str, Any]:
    """The prefill worker is killed, or stands still, in the middle of a prompt of which chunks were pushed already."""
    figures: dict[str, Any] = {}
    for deed, fault in (("killed", {"dead": True}), ("stopped", {"hang": True})):
        extra, whole = [], []
        async with bench((3, 2), time_scale=4.0) as site:
            site_names = [f"prefill-{number}" for number in range(3)]
            for _ in range(3 if quick else 8):
                prefill_s = (await site.clients.stream(site.clients.prompt(7_900), 4)).first_token_s
                stream = Stream()
                asking = asyncio.create_task(site.clients.stream(site.clients.prompt(7_900), 4, stream))
                await asyncio.sleep(prefill_s / 2)
                queued = 'kvrelay_prefill_queued_tokens{{role="prefill",worker="{}"}}'
                busy = [name for name in site_names if await site.clients.metric(queued.format(name)) > 0]
                if not busy:
                    await asking
                    continue
                hurt = time.monotonic()
                await site.suffer(busy[0], **fault)
                await asking
                await site.suffer(busy[0])
                whole.append(stream.first_token_s)
                extra.append(stream.came_s[0] - hurt - prefill_s)
                await site.clients.until("kvrelay_worker_ready", 5)
        figures[deed] = {"first_token_s": spread(whole), "beyond_one_prefill_s": spread(extra)}
    return figures


async def router(quick: bool) -> dict[str, Any]:
    """A router of 32 workers and their pages is killed and started again."""
    views, heard = [], []
    async with bench((16, 16), time_scale=0.05, store_tokens=1 << 22) as site:
        prompts = [site.clients.prompt(8_000) for _ in range(40 if quick else 200)]
        for at in range(0, len(prompts), 20):
            await asyncio.gather(*(site.clients.stream(each, 2) for each in prompts[at : at + 20]))
        await asyncio.sleep(1.0)
        pages = await site.clients.metric("kvrelay_index_pages")
        for _ in range(2 if quick else 5):
            await site.cluster.kill("router")
            await site.cluster.start_again("router")
            began = time.monotonic()
            await site.clients.until("kvrelay_worker_ready", 32)
            heard.append(time.monotonic() - began)
            await site.clients.until("kvrelay_index_pages", pages)
            views.append(time.monotonic() - began)
    return {"workers": 32, "pages": int(pages), "all_workers_s": spread(heard), "whole_view_s": spread(views)}


async def drain(quick: bool) -> dict[str, Any]:
    """Every worker is drained, killed and started again while clients ask."""
    counts = {"restarted": 0, "answered": 0, "wrong": 0, "failed": 0}
    async with bench((4, 4) if quick else (16, 16), time_scale=4.0) as site:
        stop = asyncio.Event()
        clients = [asyncio.create_task(site.keep_asking(stop, counts, 1500, 60)) for _ in range(32)]
        control = f"127.0.0.1:{site.cluster.config.router.control_port}"
        began = time.monotonic()
        for worker in await site.victims.targets():
            if worker.kind != "store":
                await _restart(site, control, worker.name)
                counts["restarted"] += 1
        took_s = time.monotonic() - began
        stop.set()
        await asyncio.gather(*clients)
    return counts | {"seconds": round(took_s, 1)}


async def _restart(site: Bench, control: str, name: str) -> None:
    async with Routers([control], site.cluster.key) as routers:
        await drained(routers, name)
        await site.suffer(name, dead=True)
        await site.suffer(name)
        while await _incarnation_is_draining(routers, name):
            await asyncio.sleep(0.05)


async def _incarnation_is_draining(routers: Routers, name: str) -> bool:
    try:
        return (await routers.remaining(name)).is_draining
    except Lost:
        return True


async def store(quick: bool) -> dict[str, Any]:
    """A store is killed while clients ask, and comes back empty."""
    counts = {"answered": 0, "wrong": 0, "failed": 0}
    back = []
    async with bench((4, 4), time_scale=4.0) as site:
        stop = asyncio.Event()
        clients = [asyncio.create_task(site.keep_asking(stop, counts, 1500, 60)) for _ in range(16)]
        for number in range(2 if quick else 6):
            name = f"store-{number % 2}"
            await asyncio.sleep(1.5)
            await site.suffer(name, dead=True)
            await asyncio.sleep(1.5)
            await site.suffer(name)
            back.append(await site.clients.until(f'kvrelay_store_ready{{store="{name}"}}', 1))
        stop.set()
        await asyncio.gather(*clients)
    return counts | {"deaths": len(back), "back_s": spread(back)}


async def copies(quick: bool) -> dict[str, Any]:
    """The store with the second copies of running answers is killed, again and again, while they are written."""
    counts = {"answered": 0, "wrong": 0, "failed": 0}
    async with bench((2, 4), time_scale=2.0, replicate_share=0.5) as site:
        stop = asyncio.Event()
        clients = [asyncio.create_task(site.keep_asking(stop, counts, 1500, 200)) for _ in range(16)]
        made = 0.0
        for _ in range(2 if quick else 6):
            made = await site.clients.until(COPIES_MADE, made + 1)
            made = await site.clients.metric(COPIES_MADE)
            await site.suffer("store-0", dead=True)
            await asyncio.sleep(2.0)
            await site.suffer("store-0")
            await site.clients.until('kvrelay_store_ready{store="store-0"}', 1)
        stop.set()
        await asyncio.gather(*clients)
    return counts | {"deaths": 2 if quick else 6, "copies": int(made)}


STAGES = {
    "decode": decode,
    "paths": paths,
    "prefill": prefill,
    "store": store,
    "copies": copies,
    "router": router,
    "drain": drain,
    "chaos": chaos,
    "engines": engines,
    "replay": replay,
    "restarts": restarts,
    "partitions": partitions,
}
