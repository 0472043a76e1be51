"""One engine of a simulated fleet: the scheduler and the cache of a mock worker, without its server, its store and its
clock. It must never step by itself: whoever has the clock asks it to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.replay.trace import BLOCK_TOKENS, TracedRequest
from kvrelay.deploy.mock.author import Author
from kvrelay.deploy.mock.kv_cache import KvCache
from kvrelay.deploy.mock.scheduler import Limits, Scheduler, Step
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.deploy.mock.timing import Chunk
from kvrelay.fleet.page_log import PageLog
from kvrelay.identity import NAMING_VERSION, root_of
from kvrelay.types import Engine, Fingerprint, Medium, PageFormat, Role, WorkerInfo

BATCHED_TOKENS = 8192
MODEL = "traced"
PRINT = Fingerprint(
    weights="traced",
    weights_epoch=0,
    format=PageFormat(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=BLOCK_TOKENS),
    naming=NAMING_VERSION,
    engine="simulated",
)


def worker(name: str, blocks: int) -> WorkerInfo:
    """It prefills and decodes, and has no store: what it finds again is in its own cache."""
    engine = Engine(
        fingerprint=PRINT,
        kv_tokens=blocks * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        max_model_len=1 << 20,
        max_batched_tokens=BATCHED_TOKENS,
        device="H100",
    )
    return WorkerInfo(
        name=name,
        incarnation="1",
        role=Role.BOTH,
        url=f"http://{name}",
        model=MODEL,
        store="none",
        engine=engine,
    )


class Polynomials:
    """Implements ``scheduler.Times`` as DynoSim's default engine, which was fitted to a GPU: seconds of a step's new
    tokens, whatever came before them, and of the share of the cache that its answers read."""

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens

    def __repr__(self) -> str:
        return f"<Polynomials of {self._kv_tokens} KV tokens>"

    def step_s(self, chunks: Iterable[Chunk], sequences: int, kv_tokens: int) -> float:
        seconds, new = 0.0, sum(chunk.new_tokens for chunk in chunks)
        if new:
            seconds += 16.50142e-3 + 1.518344e-5 * new + 4.209989e-10 * new**2
        if sequences:
            share = kv_tokens / self._kv_tokens
            seconds += 5.74e-3 + 54.01e-3 * share - 25.74e-3 * share**2
        return seconds


class NoStore:
    """Implements ``scheduler.PageSource``: nothing lies outside of the engine."""

    def find(self, sequence: Sequence, local_tokens: int, now: float) -> int | None:
        return 0

    def load_s(self, sequence: Sequence) -> float:
        return 0.0

    def loaded(self, sequence: Sequence) -> None:
        pass

    def begins(self, sequence: Sequence, until: int) -> None:
        pass

    def computed(self, sequence: Sequence, begun_s: float, now: float) -> None:
        pass

    def ended(self, sequence: Sequence, now: float) -> None:
        pass


@dataclass(eq=False)
class Stride:
    """One step, or the same one several times: as long as nothing but answers is written, none of which ends or needs
    another block, steps differ in nothing. A request that comes meanwhile cuts it short."""

    step: Step
    times: int

    @property
    def ends_s(self) -> float:
        return self.step.begun_s + self.times * self.step.seconds

    def cut(self, now: float) -> bool:
        """End with the step that is under way; False when that is the last one anyway."""
        times = max(1, math.ceil((now - self.step.begun_s) / self.step.seconds))
        is_cut = times < self.times
        self.times = min(self.times, times)
        return is_cut


class TracedEngine:
    """``log`` tells of its pages as a worker's does."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.log = PageLog(info.incarnation)
        self.stride: Stride | None = None
        """None: it is idle."""
        cache = KvCache(
            info.engine.kv_tokens // BLOCK_TOKENS,
            stored=lambda names: self.log.store(names, Medium.HBM),
            removed=lambda names: self.log.remove(names, Medium.HBM),
        )
        limits = Limits(block_tokens=BLOCK_TOKENS, max_batched_tokens=BATCHED_TOKENS, shared_chunk_tokens=0)
        self.scheduler = Scheduler(
            cache, Polynomials(info.engine.kv_tokens), limits, NoStore(), Author(range(256), 0, 1)
        )

    def __repr__(self) -> str:
        return f"<TracedEngine {self.info.name}, {self.scheduler!r}>"

    def submit(self, request_id: str, traced: TracedRequest, number: int) -> None:
        """``number`` tells its answer from all others."""
        self.scheduler.add(
            Sequence(
                id=request_id,
                tokens=[0] * traced.input_length,
                prompt_tokens=traced.input_length,
                root=root_of(PRINT),
                names=traced.full_names,
                tail=None,
                max_tokens=max(1, traced.output_length),
                min_tokens=0,
                ignore_end=True,
                state=number,
            )
        )

    def begin(self, now: float) -> Stride | None:
        """What it does next."""
        step = self.scheduler.plan(now)
        self.stride = None if step is None else Stride(step, self._times(step))
        return self.stride

    def _times(self, step: Step) -> int:
        answers_alone = not self.scheduler.waiting and all(part.written for part, _ in step.parts)
        return min(map(_alike, (part for part, _ in step.parts))) if answers_alone else 1

    def end(self, stride: Stride, now: float) -> list[Sequence]:
        """Those that got a token in its last step."""
        written: list[tuple[Sequence, int]] = []
        for _ in range(stride.times):
            written = self.scheduler.complete(stride.step, now)
        return [sequence for sequence, _ in written]


def _alike(sequence: Sequence) -> int:
    """Steps in which it gets one token each, up to its last one or to the end of its last block."""
    return min(sequence.max_tokens - sequence.written, sequence.held * BLOCK_TOKENS - sequence.computed)
