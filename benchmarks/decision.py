"""How long the brain takes to choose and reserve for one request: 64 prefill and 64 decode workers, 10k-token prompts.

Run:  python -m benchmarks.decision          (one core; naming the pages is not part of it, see benchmarks.naming)
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import describe
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, Plan
from kvrelay.identity import name_pages, root_name, root_of
from kvrelay.protocol.feed import PageChange, PageEvents, PageSnapshot
from kvrelay.types import Engine, Fingerprint, Medium, PageFormat, PageName, RequestFacts, Role, StoreInfo, WorkerInfo

POOLS = ((1, 1), (8, 8), (64, 64))
PROMPT_TOKENS = 10_000
SHARED_TOKENS = 8_000
"""Prefix that a prompt shares with one in eight of the others."""
ROUNDS = 2000
PREFILLING = 64
RUNNING = 256
RESULTS = Path(__file__).parent / "results" / "decision.json"

PAGE = PageFormat(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=32)
PRINT = Fingerprint(weights="weights", weights_epoch=0, format=PAGE, naming=1, engine="none")
ENGINE = Engine(fingerprint=PRINT, kv_tokens=400_000, block_tokens=16, max_model_len=32_768, max_batched_tokens=8192)


def fleet(prefill: int, decode: int) -> Brain:
    """Every worker on a node of its own."""
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9)
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for number in range(count):
            name = f"{role.value}-{number}"
            store = StoreInfo(name=name, incarnation="1", address=f"{name}:1", capacity_bytes=64 << 30)
            brain.members.register_store(store, 0.0)
            worker = WorkerInfo(name=name, incarnation="1", role=role, url="", model="model", store=name, engine=ENGINE)
            brain.register_worker(worker, 0.0)
    return brain


class Reports:
    """Every worker and store tells the router what it holds, as their feeds do."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain
        self._sequences: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Reports of {len(self._sequences)} holders>"

    def got(self, member: WorkerInfo | StoreInfo, names: tuple[PageName, ...], now: float) -> None:
        """``member`` has all pages of a prompt."""
        kind = type(member).__name__
        sequence = self._sequences.get(kind + member.name, 0)
        medium = Medium.HBM if isinstance(member, WorkerInfo) else Medium.MEMORY
        if sequence == 0:
            empty = PageSnapshot(incarnation="1", sequence=0, part=0, last=True, medium=medium, names=[])
            self._brain.members.pages(member, empty, now)
        self._sequences[kind + member.name] = sequence + 1
        change = PageChange(medium, [], list(names))
        self._brain.members.pages(member, PageEvents(incarnation="1", sequence=sequence + 1, changes=[change]), now)

    def served(self, prefill: str, decode: str, names: tuple[PageName, ...], now: float) -> None:
        """A request went from ``prefill`` to ``decode``: both engines and both stores have its prompt."""
        fleet = self._brain.fleet
        for name in {prefill, decode}:
            for member in (fleet.workers.get(name), fleet.stores.get(name)):
                if member is not None:
                    self.got(member.info, names, now)


def prompts() -> list[tuple[PageName, ...]]:
    root = root_name(PRINT)
    chains = []
    for number in range(64):
        shared = [number % 8] * SHARED_TOKENS
        own = [100 + number] * (PROMPT_TOKENS - SHARED_TOKENS)
        chains.append(tuple(name_pages(root, shared + own, PAGE.page_tokens)))
    return chains


def decide_s(prefill: int, decode: int) -> list[tuple[float, float]]:
    """Each decision by the clock and by the core, ``PREFILLING`` prompts and ``RUNNING`` requests being in flight."""
    brain, chains, chance = fleet(prefill, decode), prompts(), random.Random(1)
    reports, reading, running = Reports(brain), deque[Leg](), deque[str]()
    times, now = [], 0.0
    for number in range(ROUNDS + RUNNING):
        now += 0.02
        facts = RequestFacts(
            request_id=f"r{number}",
            model="model",
            prompt_tokens=(PROMPT_TOKENS,),
            max_tokens=500,
            page_names=({root_of(PRINT): chance.choice(chains)},),
        )
        ask = Ask(facts=facts, received_s=now)
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        plan = brain.begin(ask, now)
        times.append((time.perf_counter() - begin, time.thread_time() - cpu_begin))
        assert isinstance(plan, Plan), "nobody waits here"
        reading.append(
            Leg(facts.request_id, plan.prefills[0].worker if plan.prefills else "", facts.page_names[0][root_of(PRINT)])
        )
        if len(reading) > PREFILLING:
            running.append(_write(brain, reports, reading.popleft(), now))
        if len(running) > RUNNING:
            brain.finish(running.popleft(), status=200, output_tokens=100, now=now)
        brain.experience.study()  # as a router does between two requests, so that no choice waits for it
    return times[RUNNING:]


class Leg(NamedTuple):
    """A request whose prompt is being computed."""

    request_id: str
    prefill: str
    """Empty: its decode worker computes it."""
    names: tuple[PageName, ...]


def _write(brain: Brain, reports: Reports, leg: Leg, now: float) -> str:
    """The prompt is computed and handed over, and all who have it now say so; the request's id."""
    if leg.prefill:
        brain.prefill_finished(leg.request_id, 0, 0, now)
    decode = brain.decode_order(leg.request_id, now).worker
    brain.first_token(leg.request_id, now)
    reports.served(leg.prefill or decode, decode, leg.names, now)
    return leg.request_id


def summary(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds; on a machine with other work the core's own time says what a quiet one would take."""
    found = {}
    for name, column in zip(("", "cpu_"), zip(*times, strict=True), strict=True):
        ordered = sorted(column)
        found[f"{name}p50_ms"] = round(1e3 * ordered[len(ordered) // 2], 3)
        found[f"{name}p99_ms"] = round(1e3 * ordered[int(0.99 * len(ordered))], 3)
    return found


def main() -> None:
    rows = {}
    for prefill, decode in POOLS:
        row = rows[f"{prefill}x{decode}"] = summary(decide_s(prefill, decode))
        print(f"{prefill:>3} x {decode:<3} {row}")
    found = {"machine": describe(), "prompt_tokens": PROMPT_TOKENS, "pools": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
