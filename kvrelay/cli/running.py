"""What a running cluster's router says of its fleet, for `kvrelay doctor`. It must never wait long or change it."""

from __future__ import annotations

import urllib.error
import urllib.request

import msgspec

_WAIT_S = 2.0
_LONGEST_ANSWER_BYTES = 1 << 20


class Stranded(msgspec.Struct, frozen=True):
    """A worker that no other can exchange KV with."""

    worker: str
    other: str
    reason: str


class Member(msgspec.Struct, frozen=True):
    """A worker, as far as a doctor reads of it."""

    name: str
    draining: bool = False


class BrokenWay(msgspec.Struct, frozen=True):
    """A way from one store to another over which no page gets."""

    source: str
    target: str
    why: str = ""


class NotReady(msgspec.Struct, frozen=True):
    """A worker that gets no work, and nobody meant that."""

    worker: str
    why: str


class FleetHealth(msgspec.Struct, frozen=True):
    """The part of a router's /health that a doctor reads."""

    status: str
    why: str = ""
    why_is_listed: bool = False
    """A row of ``stranded``, ``broken_ways`` or ``not_ready`` says it."""
    stranded: list[Stranded] = []
    workers: list[Member] = []
    broken_ways: list[BrokenWay] = []
    not_ready: list[NotReady] = []

    @property
    def complaints(self) -> list[str]:
        """One sentence for each thing that is not as meant; empty when all is well."""
        if self.status == "ok":
            return []
        told = [*map(_told, self.stranded), *map(_no_way, self.broken_ways), *map(_idle, self.not_ready)]
        return told if self.why_is_listed else [f"{self.status}: {self.why}", *told]

    @property
    def notes(self) -> list[str]:
        """One sentence for each thing that is meant, and that somebody may have forgotten."""
        return [
            f"worker {worker.name} is draining: it gets no work until it is started again, or drained with --undo"
            for worker in self.workers
            if worker.draining
        ]


def _told(row: Stranded) -> str:
    return (
        f"worker {row.worker} exchanges KV with nobody: {row.reason} is not that of {row.other}; its prompts are "
        "computed where they are answered. Start both with the same model, dtype and versions"
    )


def _no_way(way: BrokenWay) -> str:
    return (
        f"no pages get from store {way.source} to store {way.target} ({way.why}): prompts are computed where they are "
        "answered, or by others. Look at the network between these machines, and at store.peers"
    )


def _idle(row: NotReady) -> str:
    return f"worker {row.worker} gets no work: {row.why}. Look at its log, or start it again"


def fleet_health(url: str) -> FleetHealth | None:
    """What the router at ``url`` answers; None when it does not answer as one."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_WAIT_S) as response:
            body = response.read(_LONGEST_ANSWER_BYTES)
    except urllib.error.HTTPError as error:  # 503 carries the same JSON
        body = error.read(_LONGEST_ANSWER_BYTES)
    except OSError:
        return None
    try:
        return msgspec.json.decode(body, type=FleetHealth)
    except msgspec.DecodeError:
        return None
