"""What an exact replay costs: a stream with a seed loses its decode worker, and another one writes it all again."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.breaking.asking import Asking, Stream
from benchmarks.breaking.bench import clients
from benchmarks.breaking.loss import Loss
from benchmarks.breaking.real import CONFIG
from benchmarks.breaking.stopped import stopped
from benchmarks.breaking.wired import wired
from benchmarks.progress import say_with_clock
from kvrelay.deploy.model import model_path

PROMPT_TOKENS = 300
WRITTEN_TOKENS = (50, 200, 500)
"""When the worker is lost; they are written twice."""
REST_TOKENS = 40
SAMPLED = {"temperature": 1.0, "seed": 11}


async def replay(quick: bool) -> dict[str, Any]:
    """SmolLM2 on vLLM: a decode worker stands still after so many tokens of the only stream."""
    say, figures = say_with_clock("replay"), dict[str, Any]()
    say("three engines start")
    async with wired(CONFIG, model_path()) as (cluster, _), clients() as http:
        site = Asking(cluster, http, SAMPLED)
        for _ in range(2):  # the first steps of each decode worker take longer
            await site.stream(site.prompt(PROMPT_TOKENS), 20)
        for written in WRITTEN_TOKENS[:1] if quick else WRITTEN_TOKENS:
            say(f"a decode worker stands still after {written} tokens")
            figures[str(written)] = await _lose(site, written)
    return {"prompt_tokens": PROMPT_TOKENS, "after_tokens": figures}


async def _lose(site: Asking, written: int) -> dict[str, Any]:
    ttft_s = (await site.stream(site.prompt(PROMPT_TOKENS), 1)).first_token_s
    prompt, count = site.prompt(PROMPT_TOKENS), written + REST_TOKENS
    stream, reading = await site.begun(prompt, count, written)
    worker = (await site.timeline(stream))["decode_worker"]
    hurt_s = time.monotonic()
    with stopped(site.cluster.pid(worker)):
        await reading
    await site.until(f'kvrelay_worker_ready{{role="decode",worker="{worker}"}}', 1)
    right = await site.stream(prompt, count)
    loss = Loss.of(stream, prompt_tokens=PROMPT_TOKENS, hurt_s=hurt_s, ttft_s=ttft_s, right=right)
    told = stream.timeline["resumptions"][0]
    return {
        "manner": told["manner"],
        "equal": loss.is_equal,
        "replayed_tokens": told["tokens"],
        "detection_s": round(loss.detection_s, 3),
        "beyond_detection_s": round(loss.beyond_s, 3),
        "replayed_tokens_per_s": round(told["tokens"] / loss.beyond_s, 1),
        "usual_tokens_per_s": round(1 / statistics.median(gaps(right)), 1),
        "pause_s": round(loss.pause_s, 3),
    }


def gaps(stream: Stream) -> list[float]:
    """Seconds between two tokens."""
    return [after - before for before, after in zip(stream.came_s, stream.came_s[1:], strict=False)]
