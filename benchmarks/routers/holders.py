"""What mock engines and stores hold, and how they tell a kvrelay router: page events and milestones like real ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrelay.feed import Feed
from kvrelay.fleet.page_log import PageLog
from kvrelay.identity import NAMING_VERSION, name_pages, root_name
from kvrelay.protocol.feed import Heartbeat, RegisterStore, RegisterWorker, TransferEvent
from kvrelay.types import Engine, Fingerprint, Medium, PageFormat, PageName, Role, Stage, StoreInfo, WorkerInfo

MODEL = "mock"
PAGE = PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=32)
PRINT = Fingerprint(weights="mock", weights_epoch=0, format=PAGE, naming=NAMING_VERSION, engine="mock")
ENGINE = Engine(fingerprint=PRINT, kv_tokens=400_000, block_tokens=32, max_model_len=16_384, max_batched_tokens=8_192)
STORE_BYTES = 16 << 30
HEARTBEAT_S = 0.5
_ROOT = root_name(PRINT)


def names_of(prompt: Sequence[int]) -> list[PageName]:
    """Page names of a prompt, as the engines would make them."""
    return name_pages(_ROOT, prompt, PAGE.page_tokens)


class Holder:
    """One engine or one store: the least recently used pages go first."""

    def __init__(self, info: WorkerInfo | StoreInfo, router: str, key: bytes) -> None:
        self.info = info
        is_worker = isinstance(info, WorkerInfo)
        self._medium = Medium.HBM if is_worker else Medium.MEMORY
        self._room = ENGINE.kv_tokens // PAGE.page_tokens if is_worker else STORE_BYTES // PAGE.page_bytes
        self._pages: OrderedDict[PageName, None] = OrderedDict()
        self._log = PageLog(info.incarnation)
        self.feed = Feed(
            [router],
            key,
            sender=info.name,
            registration=RegisterWorker(worker=info) if isinstance(info, WorkerInfo) else RegisterStore(store=info),
            heartbeat=lambda: Heartbeat(name=info.name, incarnation=info.incarnation, healthy=True),
            heartbeat_s=HEARTBEAT_S,
            pages=self._log,
        )

    def __repr__(self) -> str:
        return f"<Holder {self.info.name}, {len(self._pages)} of {self._room} pages>"

    def got(self, names: Sequence[PageName]) -> None:
        """A prompt's pages are here now."""
        for name in names:
            self._pages[name] = None
            self._pages.move_to_end(name)
        self._log.store(names, self._medium)
        if len(self._pages) > self._room:
            gone = [self._pages.popitem(last=False)[0] for _ in range(len(self._pages) - self._room)]
            self._log.remove(gone, self._medium)

    def reached(self, transfer: str, *stages: Stage) -> None:
        """A store tells how far a transfer is."""
        for stage in stages:
            self.feed.post(TransferEvent(store=self.info.name, transfer=transfer, stage=stage))


def worker(name: str, role: Role, url: str) -> WorkerInfo:
    """A worker on a node of its own."""
    return WorkerInfo(name=name, incarnation="1", role=role, url=url, model=MODEL, store=f"at-{name}", engine=ENGINE)


def store(name: str) -> StoreInfo:
    """The store beside the worker ``name``; nothing listens at its address, since no byte moves here."""
    return StoreInfo(name=f"at-{name}", incarnation="1", address=f"{name}:1", capacity_bytes=STORE_BYTES)
