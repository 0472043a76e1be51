"""What all mock workers of one process share: the model that they pretend to serve, laws of time, stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvrelay import __version__
from kvrelay.config import Config
from kvrelay.deploy.mock.author import Author
from kvrelay.deploy.mock.handoff import LoadLaw
from kvrelay.deploy.mock.intake import Intake
from kvrelay.deploy.mock.page_store import MockStore
from kvrelay.deploy.mock.scheduler import Limits
from kvrelay.deploy.mock.store_member import StoreMember
from kvrelay.deploy.mock.timing import Timing
from kvrelay.deploy.mock.vocabulary import load_vocabulary
from kvrelay.identity import NAMING_VERSION
from kvrelay.policy.hardware import DEVICES, shape_of
from kvrelay.policy.perf import seed
from kvrelay.protocol.feed import PushOrder
from kvrelay.router.tokens import Tokens
from kvrelay.types import Engine, Fingerprint, PageFormat

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""KV of Llama 3 8B: 131,072 bytes a token in bfloat16."""
LOAD_BYTES_PER_S = 20e9
"""From host memory into an engine's cache: PCIe 4 with 16 lanes moves 20 to 25 GB/s."""


class _ModelConfig(msgspec.Struct, frozen=True):
    """The field of a model's config.json that counts here."""

    max_position_embeddings: int = 4096


def engine_of(config: Config, folder: Path) -> Engine:
    """What every mock engine says of itself."""
    worker, mock = config.worker, config.mock
    form = PageFormat(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        page_tokens=worker.page_tokens,
        lossy=config.store.lossy,
    )
    fingerprint = Fingerprint(
        weights=f"mock of {config.model.name or folder.name}",
        weights_epoch=0,
        format=form,
        naming=NAMING_VERSION,
        engine=f"mock {__version__}",
    )
    kv_tokens = max(1, mock.kv_tokens // worker.page_tokens) * worker.page_tokens
    model = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
    return Engine(
        fingerprint=fingerprint,
        kv_tokens=kv_tokens,
        block_tokens=worker.page_tokens,
        max_model_len=min(worker.max_model_len or model.max_position_embeddings, kv_tokens),
        max_batched_tokens=worker.max_batched_tokens,
        shared_chunk_tokens=worker.shared_chunk_tokens,
        device=mock.device,
    )


class Site:
    """One model, one clock, and the stores."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        tokens: Tokens,
        *,
        stores: tuple[str, ...],
        routers: tuple[str, ...],
        key: bytes,
    ) -> None:
        self.config = config
        self.model = config.model.name or folder.name
        self.routers = routers
        self.key = key
        self.engine = engine_of(config, folder)
        self.vocabulary = load_vocabulary(folder)
        self.author = Author(self.vocabulary.words, self.vocabulary.end, config.mock.answer_tokens)
        self.intake = Intake(tokens, self.engine, self.model)
        self._loop = asyncio.get_running_loop()
        self.members = {
            name: StoreMember(
                name,
                self.form,
                config,
                routers=routers,
                key=key,
                later=self.later,
                died=self._store_died,
                push=self._push,
            )
            for name in stores
        }
        self.stores = [member.store for member in self.members.values()]
        self.by_address = {store.info.address: store for store in self.stores}

    def __repr__(self) -> str:
        return f"<Site of {self.model}, {self.stores}>"

    @property
    def form(self) -> PageFormat:
        return self.engine.fingerprint.format

    def now(self) -> float:
        return self._loop.time()

    def later(self, at_s: float, call: Callable[[], None]) -> None:
        """See ``wire.Later``."""
        self._loop.call_at(at_s, call)

    @property
    def limits(self) -> Limits:
        engine = self.engine
        return Limits(
            block_tokens=engine.block_tokens,
            max_batched_tokens=engine.max_batched_tokens,
            shared_chunk_tokens=engine.shared_chunk_tokens,
        )

    @property
    def timing(self) -> Timing:
        mock = self.config.mock
        return Timing(perf=seed(shape_of(self.form), DEVICES[mock.device]), scale=mock.time_scale)

    @property
    def load_law(self) -> LoadLaw:
        return LoadLaw(
            bytes_per_s=LOAD_BYTES_PER_S / self.config.mock.time_scale,
            wait_s=self.config.worker.load_wait_s * max(1.0, self.config.mock.time_scale),
            hidden_after_tokens=self.engine.max_batched_tokens,
        )

    async def run_stores(self) -> None:
        """Keep the routers informed of the stores, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for member in self.members.values():
                tasks.create_task(member.run())

    def _push(self, store: MockStore, order: PushOrder) -> None:
        store.push(order, self.by_address.get(order.push_to), self.now())

    def _store_died(self, dead: MockStore) -> None:
        for store in self.stores:
            store.fail_from(dead)
