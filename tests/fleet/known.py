"""A brain whose workers take a millisecond a token, and say so: for tests of what it makes of that."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.experience import Learned, kind_of
from kvrelay.fleet.flight import Ask
from kvrelay.identity import name_pages, root_name, root_of
from kvrelay.policy.fit import start
from kvrelay.policy.perf import Perf
from kvrelay.protocol.feed import PageChange, PageEvents, PageSnapshot
from kvrelay.types import Fingerprint, Medium, PageName, RequestFacts, Role, StoreInfo, WorkerInfo
from tests.fleet.values import fingerprint, store, worker

TOKEN_S = 1e-3
PERF = Perf(prefill=start(1e-4, TOKEN_S, 1e-12), step=start(0.01, 1e-4, 1e-9), answer=start(0.005))
PAGE = fingerprint().format.page_tokens


def paged(page_tokens: int) -> Fingerprint:
    """Of engines that have pages of so many tokens."""
    plain = fingerprint()
    return msgspec.structs.replace(plain, format=msgspec.structs.replace(plain.format, page_tokens=page_tokens))


def member(
    name: str, role: Role, store_name: str = "s1", *, shares: bool = True, page_tokens: int = PAGE
) -> WorkerInfo:
    """``shares``: its engine computes several prompts in one step."""
    made = worker(name, role, store=store_name, kv_tokens=1 << 20)
    engine = msgspec.structs.replace(
        made.engine,
        shared_chunk_tokens=16 if shares else 0,
        fingerprint=paged(page_tokens),
        block_tokens=max(made.engine.block_tokens, page_tokens),
    )
    return msgspec.structs.replace(made, engine=engine)


def known_brain(
    prefills: Sequence[tuple[str, str]],
    decodes: Sequence[tuple[str, str]] = (("d0", "s1"),),
    *,
    shares: bool = True,
    page_tokens: int = PAGE,
    knows_all: bool = True,
) -> Brain:
    """Prefill and decode workers as names and names of their stores. Hand-offs are known."""
    brain = Brain(dead_after_s=1e9, transfer_wait_s=120.0, knows_all=knows_all)
    like = member("any", Role.PREFILL, shares=shares, page_tokens=page_tokens)
    brain.experience.recall(Learned(kinds={kind_of(like.engine): PERF}, handoffs=0))
    for number, name in enumerate(sorted({place for _, place in (*prefills, *decodes)})):
        info = store(name, f"127.0.0.1:{9001 + number}")
        brain.members.register_store(msgspec.structs.replace(info, capacity_bytes=1 << 30), 0.0)
    for role, workers in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for name, place in workers:
            brain.register_worker(member(name, role, place, shares=shares, page_tokens=page_tokens), 0.0)
    return brain


def prompt_names(*runs: tuple[int, int], page_tokens: int = PAGE) -> tuple[PageName, ...]:
    """Names of a prompt made of runs of ``(token, count)``."""
    tokens = [token for token, count in runs for _ in range(count)]
    return tuple(name_pages(root_name(paged(page_tokens)), tokens, page_tokens))


def ask(name: str, *runs: tuple[int, int], now: float = 0.0, page_tokens: int = PAGE) -> Ask:
    """A request for a prompt of these runs."""
    facts = RequestFacts(
        request_id=name,
        model="tiny",
        prompt_tokens=(sum(count for _, count in runs),),
        max_tokens=16,
        page_names=({root_of(paged(page_tokens)): prompt_names(*runs, page_tokens=page_tokens)},),
    )
    return Ask(facts=facts, received_s=now)


class Told:
    """What members say of their pages, numbered as they would."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain
        self._sequences: dict[str, int] = {}

    def has(self, member: WorkerInfo | StoreInfo, names: Sequence[PageName], now: float) -> list[object]:
        """``member`` has these pages too; what the brain makes of it."""
        medium = Medium.HBM if isinstance(member, WorkerInfo) else Medium.MEMORY
        incarnation = member.incarnation
        key = f"{type(member).__name__} {member.name} {incarnation}"
        if key not in self._sequences:
            empty = PageSnapshot(incarnation=incarnation, sequence=0, part=0, last=True, medium=medium, names=[])
            self._brain.members.pages(member, empty, now)
        self._sequences[key] = self._sequences.get(key, 0) + 1
        change = PageChange(medium, [], list(names))
        event = PageEvents(incarnation=incarnation, sequence=self._sequences[key], changes=[change])
        _, commands = self._brain.pages(member, event, now)
        return list(commands)
