"""One engine of a simulated fleet: the scheduler and the cache of a mock worker, without its server, its store and its
clock. It must never step by itself: whoever has the clock asks it to."""

from __future__ import annotations

from benchmarks.replay.trace import BLOCK_TOKENS, TracedRequest
from kvrelay.deploy.mock.author import Author
from kvrelay.deploy.mock.kv_cache import KvCache
from kvrelay.deploy.mock.scheduler import Limits, Scheduler
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.deploy.mock.timing import Timing
from kvrelay.fleet.page_log import PageLog
from kvrelay.identity import NAMING_VERSION, root_of
from kvrelay.policy.fit import start
from kvrelay.policy.perf import ANSWER_S, Perf
from kvrelay.types import Engine, Fingerprint, Medium, PageFormat, Role, WorkerInfo

BATCHED_TOKENS = 8192
MODEL = "traced"
_TOKEN_S, _PAIR_S = 1.518344e-05, 2 * 4.209989e-10
_STEP_S, _FULL_S = 5.74e-3, 54.01e-3
LAW = Perf(
    prefill=start(16.50142e-3, _TOKEN_S, _PAIR_S),
    step=start(_STEP_S, 0.0, _FULL_S / (5_859 * BLOCK_TOKENS)),
    answer=start(ANSWER_S),
)
"""DynoSim's default engine: polynomials fitted to a GPU. Ours adds what tokens pay for those of former steps, which
makes long prompts slower; its decode step also bends down as the cache fills, of which a fleet that is not overloaded
sees nothing."""
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
        store=f"none-{name}",
        engine=engine,
    )


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


class TracedEngine:
    """``log`` tells of its pages as a worker's does."""

    def __init__(self, info: WorkerInfo, law: Perf = LAW) -> None:
        self.info = info
        self.log = PageLog(info.incarnation)
        self.steps = False
        """A step is under way."""
        cache = KvCache(
            info.engine.kv_tokens // BLOCK_TOKENS,
            stored=lambda names: self.log.store(names, Medium.HBM),
            removed=lambda names: self.log.remove(names, Medium.HBM),
        )
        limits = Limits(block_tokens=BLOCK_TOKENS, max_batched_tokens=BATCHED_TOKENS, shared_chunk_tokens=0)
        self.scheduler = Scheduler(cache, Timing(perf=law), limits, NoStore(), Author(range(256), 0, 1))

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
