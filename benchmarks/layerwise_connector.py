"""An experiment, not the product: D starts its first forward while the last layers of the prompt still arrive.

Three ways, chosen by the first token of the prompt, so that one engine measures all of them in turn. Failures end the
engine: this is for timing alone.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np
import torch

from kvrelay.connector import vllm as product
from kvrelay.connector.loader import Loader, LoadResult, _Load
from kvrelay.connector.lookup import Lookup
from kvrelay.connector.plan import LoadJob

SYNC, EARLY = 11, 12
"""First tokens of prompts that are loaded synchronously, or reported as loaded before they are."""
BOUND_S = 0.040
"""Longest predicted wait with which a forward is entered."""
STEP_BOUND_S = 2 * BOUND_S


class Arrival:
    """When the last layer will be in, from the pace of those that were waited for."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def predicted_s(self, done: int, layers: int, now: float) -> float | None:
        """Seconds from now; None until the pace of a few layers is known."""
        if not self._seen or done != self._seen[-1][1]:
            self._seen = [*self._seen[-3:], (now, done)]
        if done == layers:
            return 0.0
        if len(self._seen) < 4 or done < 4:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (layers - done) * (last_s - first_s) / (last - first) - (now - last_s)


class LayerLoader(Loader):
    """Tells of each layer that is in; reports some loads before their end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.moved = threading.Condition()
        self.early: dict[str, _Load] = {}
        self.sync: dict[str, _Load | None] = {}
        self._arrivals: dict[str, Arrival] = {}
        self.kinds: dict[str, int] = {}
        self.waited_s = 0.0
        self.misses = 0
        super().__init__(*args, **kwargs)

    def start(self, job: LoadJob, arena: Any, epoch: int) -> None:
        if self.kinds.get(job.request_id) == SYNC:
            self.sync[job.request_id] = None
        super().start(job, arena, epoch)

    def _advance(self, load: _Load) -> bool:
        id = load.job.request_id
        if id in self.sync:
            self.sync[id] = load
        moved = super()._advance(load)
        if moved:
            with self.moved:
                self.moved.notify_all()
        if self.kinds.get(id) == EARLY and id not in self.early:
            arrival = self._arrivals.setdefault(id, Arrival())
            left_s = arrival.predicted_s(load.layer, len(self._layers), time.monotonic())
            if left_s is not None and left_s <= BOUND_S:
                self.early[id] = load
                super()._report(LoadResult(id, frozenset(), (), {}))
        return moved

    def _report(self, result: LoadResult) -> None:
        if result.bad_blocks:
            print("layerwise bad", result, flush=True)
        with self.moved:
            early = self.early.pop(result.request_id, None)
            sync = result.request_id in self.sync
            self.sync.pop(result.request_id, None)
            self.moved.notify_all()
        if sync:
            with self._lock:
                self._pending.pop(result.request_id, None)
        elif early is None:
            super()._report(result)

    def wait_layer(self, layer: int, until: float) -> None:
        start = time.monotonic()
        with self.moved:
            while not self._has(layer):
                self.moved.wait(1.0)
        end = time.monotonic()
        self.waited_s += end - start
        self.misses += end > until and end - start > 0.001

    def _has(self, layer: int) -> bool:
        loads = [*self.early.values(), *self.sync.values()]
        return all(load is not None and load.layer > layer for load in loads)


class ExperimentConnector(product.KvrelayConnector):
    """The product's connector with the two other ways to load."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrivals: dict[str, Arrival] = {}
        self._until = 0.0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not tokens or request.all_token_ids[0] != SYNC:
            return tokens, is_async
        search = self._half._requests[request.request_id].search
        assert search is not None
        arrival = self._arrivals.setdefault(request.request_id, Arrival())
        left_s = arrival.predicted_s(self._layers_in(search.best().lookup), len(self._names), time.monotonic())
        if left_s is None or left_s > BOUND_S:
            return None, False
        return min(tokens, request.num_tokens - 1 - num_computed_tokens), False

    def _layers_in(self, lookup: Lookup) -> int:
        refs = [page.slot for page in lookup.usable()]
        slots, generations = (
            np.array(column, np.int64) for column in zip(*[(r.slot, r.generation) for r in refs], strict=True)
        )
        arena = self._client.arena
        assert arena is not None
        return int(arena.ready_layers(slots, generations).all(axis=1).sum())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and request.all_token_ids[0] == SYNC:
            # Of a synchronous load the last token is computed; the product's loads end with it.
            job = self._half._new_loads[-1]
            self._half._new_loads[-1] = dataclasses.replace(job, begin=job.begin - 1, end=job.end - 1)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.kinds = {job.request_id: self._requests[job.request_id].all_token_ids[0] for job in meta.loads}
        return meta

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        self._worker._loader.close()
        self._loader = LayerLoader(
            self._worker._layers, self._worker._mover, self._worker._heads, wait_s=self._settings.load_wait_s
        )
        self._worker._loader = self._loader

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._loader.kinds |= getattr(kv_connector_metadata, "kinds", {})
        super().handle_preemptions(kv_connector_metadata)
        self._until = time.monotonic() + STEP_BOUND_S

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._worker is not None
        if self._loader.early or self._loader.sync:
            self._loader.wait_layer(self._worker._index[layer_name], self._until)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._loader.waited_s:
            print(f"layerwise waited_ms={1e3 * self._loader.waited_s:.1f} missed={self._loader.misses}", flush=True)
            self._loader.waited_s, self._loader.misses = 0.0, 0
