"""Real engines, one prefill and two decode workers on two nodes: what their deaths cost. Times are of those engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from benchmarks.breaking.asking import Asking
from benchmarks.breaking.bench import clients
from benchmarks.breaking.loss import Loss, spread, table
from benchmarks.breaking.stopped import stopped
from benchmarks.breaking.wired import wired
from benchmarks.progress import say_with_clock
from kvrelay.config import ClusterConfig, Config, ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import model_path

STREAMS = 8
SHORT_TOKENS = 120
"""Tokens of a prompt, where eight of them are asked at once."""
PROMPT_TOKENS = 1200
ANSWER_TOKENS = 250
BEGUN_TOKENS = 10
PREFILL, DECODE = "prefill-0", "decode-0"
PUSH_BEYOND_S = 3.0
"""Allowed beyond one prefill after the death of P in the middle of its push."""
CONFIG = Config(
    model=ModelConfig(dtype="float32", name="smollm2"),  # so that equal answers are equal to the byte
    router=RouterConfig(port=0, control_port=0, local_prefill="never"),
    store=StoreConfig(arena_bytes=1 << 30),
    worker=WorkerConfig(kv_cache_bytes=256 << 20, max_batched_tokens=256, max_model_len=2048),
    cluster=ClusterConfig(prefill=1, decode=2),
)

Deed = Callable[[LocalCluster, str], AbstractAsyncContextManager[None]]
"""Lasts for the time of the block."""


@asynccontextmanager
async def standing_still(cluster: LocalCluster, name: str) -> AsyncIterator[None]:
    with stopped(cluster.pid(name)):
        yield


@asynccontextmanager
async def killed(cluster: LocalCluster, name: str) -> AsyncIterator[None]:
    await cluster.kill(name)
    yield
    await cluster.restart(name)


async def engines(quick: bool) -> dict[str, Any]:
    """SmolLM2 on vLLM: a decode worker is lost whose pages are found, or not; P is killed in the middle of its push."""
    say = say_with_clock("engines")
    say("three engines start")
    async with wired(CONFIG, model_path()) as (cluster, _), clients() as http:
        site = Asking(cluster, http)
        await asyncio.gather(*(site.stream(site.prompt(SHORT_TOKENS), 40) for _ in range(4)))  # first steps take longer
        rounds = range(1 if quick else 2)
        say("a decode worker is killed with eight streams running, and started again")
        eight = [await _lose_of_eight(site) for _ in rounds]
        say("a decode worker is killed, or stands still, whose pages are in a store")
        restore = {deed.__name__: [await _lose(site, deed) for _ in rounds] for deed in (killed, standing_still)}
        say("the prefill worker is killed in the middle of its push")
        pushes = [await _kill_in_push(site) for _ in rounds]
        await cluster.kill(PREFILL)  # its own cache has the prompts
        say("a decode worker stands still whose pages are nowhere")
        re_prefill = [await _lose(site, standing_still, nowhere=True) for _ in rounds]
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "eight_streams": _eight(eight),
        "restore": {deed: table(losses, restored=True) for deed, losses in restore.items()},
        "re_prefill": {standing_still.__name__: table(re_prefill, restored=False)},
        "prefill_killed_in_its_push": {
            "streams": len(pushes),
            "equal": sum(push["equal"] for push in pushes),
            "prefill_s": spread([push["prefill_s"] for push in pushes]),
            "beyond_one_prefill_s": spread([push["beyond_s"] for push in pushes]),
            "allowed_beyond_s": PUSH_BEYOND_S,
        },
    }


async def _until_ready(site: Asking, name: str, role: str = "decode") -> None:
    await site.until(f'kvrelay_worker_ready{{role="{role}",worker="{name}"}}', 1)


# ---------------------------------------------------------------- eight streams, a decode worker killed


async def _lose_of_eight(site: Asking) -> dict[str, Any]:
    """Those of eight streams that were written by the killed worker, and how many of all are as without its death."""
    ttft_s = (await site.stream(site.prompt(SHORT_TOKENS), 1)).first_token_s
    prompts = [site.prompt(SHORT_TOKENS) for _ in range(STREAMS)]
    begun = await asyncio.gather(*(site.begun(prompt, ANSWER_TOKENS, BEGUN_TOKENS) for prompt in prompts))
    hurt_s = time.monotonic()
    async with killed(site.cluster, DECODE):
        streams = await asyncio.gather(*(reading for _, reading in begun))
    await _until_ready(site, DECODE)
    rights = await asyncio.gather(*(site.stream(prompt, ANSWER_TOKENS) for prompt in prompts))
    moved = [
        Loss.of(stream, prompt_tokens=SHORT_TOKENS, hurt_s=hurt_s, ttft_s=ttft_s, right=right)
        for stream, right in zip(streams, rights, strict=True)
        if "resumptions" in stream.timeline
    ]
    equal = sum(stream.says(right.tokens) for stream, right in zip(streams, rights, strict=True))
    return {"equal": equal, "moved": moved, "usual_s": [right.longest_pause_s for right in rights]}


def _eight(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    moved = [loss for each in rounds for loss in each["moved"]]
    return {
        "prompt_tokens": SHORT_TOKENS,
        "streams": STREAMS * len(rounds),
        "completed_equal": sum(each["equal"] for each in rounds),
        "longest_pause_without_s": spread([pause for each in rounds for pause in each["usual_s"]]),
        "moved": table(moved, restored=True),
    }


# ---------------------------------------------------------------- one stream alone


async def _lose(site: Asking, deed: Deed, *, nowhere: bool = False) -> Loss:
    """Something happens to the decode worker of a stream; with ``nowhere`` after all stores have lost what they had."""
    ttft_s = (await site.stream(site.prompt(PROMPT_TOKENS), 1)).first_token_s
    prompt = site.prompt(PROMPT_TOKENS)
    stream, reading = await site.begun(prompt, ANSWER_TOKENS, BEGUN_TOKENS)
    for store in site.cluster.stores if nowhere else ():
        await site.cluster.restart(store)
    worker = (await site.timeline(stream))["decode_worker"]
    hurt_s = time.monotonic()
    async with deed(site.cluster, worker):
        await reading
    await _until_ready(site, worker)
    right = await site.stream(prompt, ANSWER_TOKENS)
    return Loss.of(stream, prompt_tokens=PROMPT_TOKENS, hurt_s=hurt_s, ttft_s=ttft_s, right=right)


async def _kill_in_push(site: Asking) -> dict[str, Any]:
    """The only P is killed when half of a prompt is computed and pushed; D goes on from what arrived."""
    prefill_s = (await site.stream(site.prompt(PROMPT_TOKENS), 1)).first_token_s
    prompt = site.prompt(PROMPT_TOKENS)
    stream, reading = await site.begun(prompt, BEGUN_TOKENS, 0)
    await asyncio.sleep(prefill_s / 2)
    hurt_s = time.monotonic()
    await site.cluster.kill(PREFILL)
    await reading
    await site.cluster.restart(PREFILL)
    await _until_ready(site, PREFILL, "prefill")
    right = await site.stream(prompt, BEGUN_TOKENS)
    return {
        "equal": stream.says(right.tokens),
        "prefill_s": prefill_s,
        "beyond_s": stream.came_s[0] - hurt_s - prefill_s,
    }
