"""An engine without a model around both halves of the connector, and real links to a store: its KV shows whether it is
right."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import BlockLayout, split_cache, token_slots
from kvrelay.connector.mover import HostMover
from kvrelay.connector.plan import StepPlan
from kvrelay.connector.scheduler import SchedulerHalf
from kvrelay.connector.worker import WorkerHalf
from kvrelay.errors import Lost
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat
from tests.connector import caches
from tests.connector.fakes import ENGINE, PAGE, FakeRequest
from tests.patience import PATIENCE_S, wait_until

LAYERS = 3
FORMAT = PageFormat(layers=LAYERS, kv_heads=caches.HEADS, head_dim=caches.HEAD_DIM, dtype="float32", page_tokens=PAGE)
LOAD_WAIT_S = 5.0
BLOCKS = 64


class FakeEngine:
    """One worker process, without the process. ``owner`` is ``name/incarnation``."""

    def __init__(self, socket: Path, key: bytes, owner: str) -> None:
        fingerprint = msgspec.structs.replace(ENGINE.fingerprint, format=FORMAT)
        engine = msgspec.structs.replace(ENGINE, fingerprint=fingerprint, kv_tokens=BLOCKS * caches.BLOCK_TOKENS)
        self.clients = [
            StoreClient(socket, key, owner=owner, format=FORMAT, grant_slots=grant_slots) for grant_slots in (16, 0)
        ]
        scheduler, worker = self.clients
        self.layers: dict[str, torch.Tensor] = {f"layer.{i}": caches.empty_cache(BLOCKS) for i in range(LAYERS)}
        self._layout = BlockLayout(self.layers["layer.0"], caches.write_dim_major)
        self._half = SchedulerHalf(scheduler, engine, owner=owner, load_wait_s=LOAD_WAIT_S)
        self._worker = WorkerHalf(
            worker,
            self.layers,
            HostMover(self._layout, worker.ring),
            RankHeads.of(0, 1, caches.HEADS),
            load_wait_s=LOAD_WAIT_S,
            connect=lambda format: worker,
        )
        self._blocks = itertools.count()
        self._ids = itertools.count()

    def __enter__(self) -> FakeEngine:
        for client in self.clients:
            client.start()
        self.wait_attached()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The end of a process: its links break, and nothing is said."""
        self._worker.close()
        for client in self.clients:
            client.close()

    def wait_attached(self) -> None:
        """Both halves have their link, and slots to write into."""
        assert all(client.wait_attached(PATIENCE_S) for client in self.clients)
        wait_until(lambda: not self.clients[0]._stock.is_low)

    @property
    def is_detached(self) -> bool:
        return not any(client.arena for client in self.clients)

    def begin(self, tokens: list[int], params: dict[str, Any] | None = None) -> Running:
        """A request comes in; nothing of it is computed yet."""
        request = FakeRequest(f"r{next(self._ids)}", tokens, kv_transfer_params=params)
        self._half.on_new_request(request)
        return Running(self, request)

    def serve(self, tokens: list[int], params: dict[str, Any] | None = None) -> int:
        """The whole prompt, loaded as far as possible and computed from there, is right. Tokens loaded."""
        running = self.begin(tokens, params)
        loaded = running.admit()
        running.compute()
        running.end()
        self.told()
        return loaded

    def told(self) -> None:
        """The store, if there is one, has heard what it was told until now: messages are taken in order."""
        with contextlib.suppress(Lost):
            self.clients[0].exists([])

    # ------------------------------------------------------------ what ``Running`` needs

    def matched(self, request: FakeRequest) -> int | None:
        return self._half.matched_tokens(request, 0)

    def allocate(self, request: FakeRequest, external_tokens: int) -> list[int]:
        count = -(-request.num_tokens // caches.BLOCK_TOKENS)
        blocks = [next(self._blocks) % BLOCKS for _ in range(count)]
        self._half.allocated(request, blocks, external_tokens)
        return blocks

    def load(self, request: FakeRequest, blocks: list[int], tokens: int) -> int:
        """Run the load that was planned; how many of its ``tokens`` are good."""
        self.step([], [])
        wait_until(lambda: request.request_id in self._worker.collect())
        bad = self._worker.take_bad_blocks()
        self._half.loads_finished([request.request_id], bad)
        firsts = [at for at, block in enumerate(blocks) if block in bad]
        return min(tokens, firsts[0] * caches.BLOCK_TOKENS) if firsts else tokens

    def step(self, steps: list[tuple[FakeRequest, list[int], int, int]], blocks: list[int]) -> StepPlan:
        """One step of the engine: the connector's plan, a forward, the connector's copies."""
        plan = self._half.build_plan(steps)
        self._worker.before_step(plan)
        for layer, name in enumerate(self.layers):
            for request, table, computed, scheduled in steps:
                self._write(layer, request, table, computed, scheduled)
            self._worker.save_layer(name)
        self._worker.after_step()
        return plan

    def _write(self, layer: int, request: FakeRequest, blocks: list[int], start: int, count: int) -> None:
        key, value = truth(layer, request.tokens, start, count)
        at, offset = token_slots(blocks, start, count, caches.BLOCK_TOKENS)
        slots = at * caches.BLOCK_TOKENS + offset
        caches.write_dim_major(key, value, *split_cache(self.layers[f"layer.{layer}"]), slots)

    def check(self, request: FakeRequest, blocks: list[int]) -> None:
        """All KV of the prompt is what computing it gives."""
        places = token_slots(blocks, 0, request.num_tokens, caches.BLOCK_TOKENS)
        for layer, kv_layer in enumerate(self.layers.values()):
            expected = truth(layer, request.tokens, 0, request.num_tokens)
            for ours, right in zip(self._layout.gather(kv_layer, *places), expected, strict=True):
                assert torch.equal(ours, right), f"layer {layer} of {request.request_id} is wrong"

    def finish(self, request: FakeRequest, blocks: list[int]) -> None:
        self._half.finished(request, blocks)
        self.step([], [])


class Running:
    """One request in the engine."""

    def __init__(self, engine: FakeEngine, request: FakeRequest) -> None:
        self._engine = engine
        self.request = request
        self._blocks: list[int] = []
        self.computed = 0

    def admit(self) -> int:
        """Wait for the connector's answer, and load what there is. Tokens loaded."""
        answers: list[int] = []

        def answered() -> bool:
            tokens = self._engine.matched(self.request)
            if tokens is not None:
                answers.append(tokens)
            return tokens is not None

        wait_until(answered)
        self._blocks = self._engine.allocate(self.request, answers[0])
        self.computed = self._engine.load(self.request, self._blocks, answers[0]) if answers[0] else 0
        return self.computed

    def compute(self, tokens: int | None = None, chunk: int = 2 * PAGE) -> None:
        """Compute the next ``tokens`` (None: all that are left), ``chunk`` a step."""
        self._blocks = self._blocks or self._engine.allocate(self.request, 0)
        end = self.request.num_tokens if tokens is None else self.computed + tokens
        while self.computed < end:
            count = min(chunk, end - self.computed)
            self._engine.step([(self.request, self._blocks, self.computed, count)], self._blocks)
            self.computed += count
            self.request.num_computed_tokens = self.computed

    def end(self) -> None:
        """The prompt is done, and right."""
        self._engine.check(self.request, self._blocks)
        self._engine.finish(self.request, self._blocks)


def truth(layer: int, tokens: list[int], start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[count, heads, head_dim]`` of some positions: they follow from all tokens up to each."""
    sums = torch.tensor(tokens, dtype=torch.int64).cumsum(0)[start : start + count] % 65_521
    base = sums.float()[:, None, None] + 100_000 * layer
    cells = torch.arange(caches.HEADS * caches.HEAD_DIM).view(1, caches.HEADS, caches.HEAD_DIM)
    return base + cells, -base - cells
