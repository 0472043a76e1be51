"""The worker half: moves pages between the engine's blocks and the arena. The forward pass never waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from kvrelay.connector.arenas import Arenas
from kvrelay.connector.heads import RankHeads
from kvrelay.connector.load import LoadResult
from kvrelay.connector.loader import Loader
from kvrelay.connector.mover import Mover
from kvrelay.connector.plan import SaveJob, StepPlan
from kvrelay.connector.saver import StepSaver
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, SlotRef

logger = logging.getLogger(__name__)

MIN_RESTORED_BYTES = 1 << 20
"""Smaller loads say nothing about a bandwidth: most of their time is that of Python."""


class WorkerHalf:
    """Lives in vLLM's worker process; called from the thread that runs the forward pass."""

    def __init__(
        self,
        client: StoreClient,
        kv_caches: dict[str, torch.Tensor],
        mover: Mover,
        heads: RankHeads,
        *,
        load_wait_s: float,
        connect: Callable[[PageFormat], StoreClient],
    ) -> None:
        """``kv_caches``: one layer's cache each, of this rank's ``heads``, by layer name, in the order of the model.

        ``connect`` starts a client for pages of another format.
        """
        self._client = client
        self._arenas = Arenas(client, connect)
        self._heads = heads
        self._layers = list(kv_caches.values())
        self._index = {name: i for i, name in enumerate(kv_caches)}
        self._mover = mover
        self._loader = Loader(self._layers, mover, heads, wait_s=load_wait_s)
        self._saver: StepSaver | None = None
        self._saving: list[SaveJob] = []
        """What it saves."""
        self._bad_blocks: set[int] = set()

    def __repr__(self) -> str:
        return f"<WorkerHalf {len(self._layers)} layers, {self._mover}, {self._loader}>"

    def before_step(self, plan: StepPlan) -> None:
        """Copy what ended requests left behind, before this step overwrites their blocks; then start the loads."""
        self._saver = None
        if plan.late_saves:
            saver = self._saver_for(plan.late_saves, plan.epoch)
            for layer, kv_layer in enumerate(self._layers):
                if saver is None or not self._save(saver, layer, kv_layer, plan.late_saves):
                    break
        # Ended requests' blocks may be written again, by this step and by its loads, once their last copies were made.
        self._mover.fence()
        for job in plan.loads:
            self._loader.start(job, self._arenas.of(job.format), plan.epoch)
        for request_id in plan.cancels:
            self._loader.cancel(request_id)
        self._saving = plan.saves
        if plan.saves:
            self._saver = self._saver_for(plan.saves, plan.epoch)

    def _saver_for(self, jobs: list[SaveJob], epoch: int) -> StepSaver | None:
        if self._heads.shard is None:
            return None
        arena = self._client.arena
        if arena is None or arena.epoch != epoch:
            self._client.report({"saves_wrong_epoch": 1})
            self._give_up(jobs)
            return None
        try:
            return self._mover.open(arena, jobs, self._heads.shard)
        except Exception:  # border: vLLM's forward goes on, whatever happens to a save
            logger.exception("a step's pages could not be located; they are given up")
            self._client.report({"saves_crashed": 1})
            self._give_up(jobs)
            return None

    def _give_up(self, jobs: list[SaveJob]) -> None:
        """The store hears of it now: the engine may have no further step in which its scheduler would find out."""
        self._client.suspect([SlotRef(page.slot, page.generation) for job in jobs for page in job.pages])

    def save_layer(self, name: str) -> None:
        """The forward wrote one layer's K and V of this step."""
        if self._saver is not None:
            layer = self._index[name]
            if not self._save(self._saver, layer, self._layers[layer], self._saving):
                self._saver = None

    def _save(self, saver: StepSaver, layer: int, kv_layer: torch.Tensor, jobs: list[SaveJob]) -> bool:
        try:
            saved = self._mover.save(saver, layer, kv_layer)
        except Exception:  # border: vLLM's forward goes on, whatever happens to a save
            logger.exception("saving layer %d failed; its pages are given up", layer)
            self._client.report({"saves_crashed": 1})
            saved = False
        if not saved:
            self._give_up(jobs)
        return saved

    def after_step(self) -> None:
        self._saver = None

    def collect(self) -> set[str]:
        """Requests whose load ended since the last call."""
        results = self._loader.collect()
        for result in results:
            self._note(result)
        return {result.request_id for result in results}

    def _note(self, result: LoadResult) -> None:
        # Also of a cancelled load: its request may still want the blocks. An aborted one holds them alone till now.
        self._bad_blocks |= result.bad_blocks
        if result.suspects:
            self._arenas.client(result.format).suspect(list(result.suspects))
        if result.size_bytes >= MIN_RESTORED_BYTES:
            self._client.report({"restored_bytes": result.size_bytes, "restore_us": round(1e6 * result.moving_s)})
        if result.counts:
            level = logging.INFO if result.counts.keys() == {"load_cancelled"} else logging.WARNING
            logger.log(level, "load of %s: %s; the engine computes the rest", result.request_id, result.counts)
            self._client.report(result.counts)

    def take_bad_blocks(self) -> set[int]:
        """Blocks that hold garbage, of the loads of the last ``collect``."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        self._loader.close()
        self._arenas.close()
        self._mover.close()
