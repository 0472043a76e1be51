"""What the fleet looks like to an operator. It must never call a fleet healthy that cannot answer a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.drain_command import DrainCommand
from kvrelay.fleet.member import Member
from kvrelay.fleet.ways import BrokenWay
from kvrelay.fleet.workers import Handoff, NoHandoff
from kvrelay.policy.breaker import FAILURES_TO_OPEN
from kvrelay.types import Role, StoreInfo, Value, WorkerInfo


class Judgement(Value, frozen=True):
    """What is wrong most."""

    status: str
    why: str
    is_listed: bool = False
    """A list says it, too: ``stranded``, ``broken_ways`` or ``not_ready``."""


class Health(Value, frozen=True, kw_only=True):
    """JSON-ready; ``status`` is ok, degraded (serving, not as meant) or unavailable; ``why`` says what to do."""

    status: str
    why: str
    why_is_listed: bool
    """``stranded``, ``broken_ways`` or ``not_ready`` says all of ``why``, too: who shows those can leave it out."""
    workers: list[dict[str, object]]
    stores: list[dict[str, object]]
    unpaired: list[dict[str, str]]
    """Pairs of workers that cannot hand KV over, with the field that differs; never used, and no harm by themselves."""
    stranded: list[dict[str, str]]
    """Workers that none of those they could work with understands, with the field that differs."""
    broken_ways: list[dict[str, object]]
    """From one store to another no page gets any more: transfers failed again and again. A probe goes now and then."""
    not_ready: list[dict[str, str]]
    """Workers that get no work though nobody drains them and they did not say goodbye, and why."""
    in_flight: int

    @property
    def serving(self) -> bool:
        return self.status != "unavailable"


def examine(brain: Brain, now: float, drain: DrainCommand | None = None, *, short: str = "") -> Health:
    """Health of the fleet at ``now``; ``drain`` is how its router's operators call it, ``short`` what the router itself
    has run short of, if anything."""
    usable = brain.fleet.workers.usable(now)
    unpaired = list(_unpaired(brain, usable, now))
    lost, parted = stranded(brain, now), cut_off(brain, now)
    not_ready = list(_not_ready(brain, now))
    verdict = _judge(brain, usable, lost, not_ready, drain or DrainCommand(), short, now)
    return Health(
        status=verdict.status,
        why=verdict.why,
        why_is_listed=verdict.is_listed,
        workers=[
            _worker(brain, member, now) | {"cut_off": member.info.name in parted} for member in brain.fleet.workers
        ],
        stores=[
            _member(brain.fleet.stores.is_usable(member.info.name, now), member, now) for member in brain.fleet.stores
        ],
        unpaired=unpaired,
        stranded=lost,
        broken_ways=[msgspec.structs.asdict(way) for way in brain.fleet.ways.broken()],
        not_ready=not_ready,
        in_flight=brain.in_flight,
    )


def serves_unless_drained(brain: Brain, now: float) -> bool:
    """Whether requests are answered, or would be, had nobody drained who could answer them."""
    able = (*brain.fleet.workers.usable(now), *(member.info for member in _draining(brain, now)))
    return any(worker.role.decodes for worker in able)


def _judge(
    brain: Brain,
    usable: Sequence[WorkerInfo],
    lost: list[dict[str, str]],
    not_ready: list[dict[str, str]],
    drain: DrainCommand,
    short: str,
    now: float,
) -> Judgement:
    if not any(worker.role.decodes for worker in usable):
        draining = [member.info.name for member in _draining(brain, now) if member.info.role.decodes]
        return Judgement("unavailable", f"no worker with role decode or both is ready; {_cure(draining, drain)}")
    if failing := _failing_decode_workers(brain, usable, now):
        return failing
    if short:
        return Judgement("degraded", short)
    for worker in usable:
        if not brain.fleet.stores.is_usable(worker.store, now):
            return Judgement("degraded", _no_store(brain, worker))
    if broken := brain.fleet.ways.broken():
        return Judgement("degraded", _no_way(broken[0], more=len(brain.fleet.ways) - 1), is_listed=True)
    if lost:
        told = ", ".join(f"{row['worker']} ({row['reason']} is not that of {row['other']})" for row in lost)
        return Judgement("degraded", f"no other worker can exchange KV with {told}; see stranded", is_listed=True)
    alone = _alone(brain, usable, now)
    if alone:
        draining = [member.info.name for member in _draining(brain, now) if member.info.role.prefills]
        return Judgement("degraded", f"no prefill worker is ready for {', '.join(alone)}; {_cure(draining, drain)}")
    if not_ready:
        told = ", ".join(f"{row['worker']} ({row['why']})" for row in not_ready)
        return Judgement("degraded", f"without new work: {told}; look at its log, or start it again", is_listed=True)
    return Judgement("ok", "")


def _not_ready(brain: Brain, now: float) -> Iterator[dict[str, str]]:
    for member in brain.fleet.workers:
        if why := _why_not_ready(brain, member, now):
            yield {"worker": member.info.name, "why": why}


def _why_not_ready(brain: Brain, member: Member[WorkerInfo], now: float) -> str:
    """Why the worker gets no work; empty when it does, and when that is meant."""
    workers, name = brain.fleet.workers, member.info.name
    if member.left or member.draining or workers.is_usable(name, now):
        return ""
    if not workers.is_alive(name, now):
        return f"nothing was heard of it for {now - member.heard_s:.0f} s"
    if not member.healthy:
        return f"its last healthy heartbeat was {workers.unwell_s(name, now):.0f} s ago"
    return "it makes no progress with what it was asked"


def _failing_decode_workers(brain: Brain, usable: Sequence[WorkerInfo], now: float) -> Judgement | None:
    """What is said when every worker that could write answers fails, else None. Once one may be tried again it is not
    unavailable: a balancer that sent nothing would never let the probe go."""
    breakers = brain.outcomes.breakers
    decodes = [worker.name for worker in usable if worker.role.decodes]
    if not all(breakers.are_open(decodes)):
        return None
    told = ", ".join(f"{name} (circuit breaker {breakers.of(name).state})" for name in decodes)
    begin = f"every worker that can write answers refused or failed {FAILURES_TO_OPEN} requests in a row: {told}"
    if any(breakers.allows(name, now) for name in decodes):
        return Judgement("degraded", f"{begin}; the next request tries one of them again; look at their logs")
    wait_s = breakers.wait_s(decodes, now)
    until = f"until one is tried again, in {wait_s:.1f} s" if wait_s else "until the one that tries it again has ended"
    return Judgement("unavailable", f"{begin}; all requests get 503 {until}; look at their logs")


def _draining(brain: Brain, now: float) -> Iterator[Member[WorkerInfo]]:
    """Workers that would get work, had nobody drained them."""
    workers = brain.fleet.workers
    return (each for each in workers if each.draining and each.healthy and workers.is_alive(each.info.name, now))


def _cure(draining: Sequence[str], drain: DrainCommand) -> str:
    """What brings a worker back where none is ready."""
    if not draining:
        return "start one, or look at its log"
    undo = drain.undo(draining[0])
    return f"draining, so without new work: {', '.join(draining)}; start another, or give it work again: {undo}"


def _no_store(brain: Brain, worker: WorkerInfo) -> str:
    if brain.fleet.stores.get(worker.store) is not None:
        return f"store {worker.store!r} of worker {worker.name!r} is not heard; see its log"
    return (
        f"worker {worker.name!r} names the store {worker.store!r}, which no store here is called; "
        "start that store with this router's --router, or give the worker the right --store-name"
    )


def _no_way(way: BrokenWay, more: int) -> str:
    others = f"; so do {more} other ways" if more else ""
    return (
        f"transfers from store {way.source!r} to store {way.target!r} fail ({way.why}){others}: prompts are computed "
        "where they are answered, or by others; look at the network between these machines, and at store.peers"
    )


def _alone(brain: Brain, usable: Sequence[WorkerInfo], now: float) -> list[str]:
    """Decode workers that compute every prompt themselves."""
    return [
        decode.name
        for decode in usable
        if decode.role is Role.DECODE
        if not any(isinstance(brain.fleet.pair(prefill, decode, now), Handoff) for prefill in _of(usable, decode))
    ]


def _of(usable: Sequence[WorkerInfo], decode: WorkerInfo) -> list[WorkerInfo]:
    """Workers that prefill the model of ``decode``."""
    return [worker for worker in usable if worker.role.prefills and worker.model == decode.model]


def _unpaired(brain: Brain, usable: Sequence[WorkerInfo], now: float) -> Iterator[dict[str, str]]:
    for decode in (worker for worker in usable if worker.role.decodes):
        for prefill in _of(usable, decode):
            pair = brain.fleet.pair(prefill, decode, now)
            if isinstance(pair, NoHandoff) and pair.reason != "colocated":
                yield {"prefill": prefill.name, "decode": decode.name, "reason": pair.reason}


def stranded(brain: Brain, now: float) -> list[dict[str, str]]:
    """Usable workers with others to work with, all of which differ: name, one of the others, and the field."""
    usable = brain.fleet.workers.usable(now)
    pairs = [(prefill, decode) for decode in usable if decode.role.decodes for prefill in _of(usable, decode)]
    fits: set[str] = set()
    differs: dict[str, dict[str, str]] = {}
    for prefill, decode in pairs:
        pair = brain.fleet.pair(prefill, decode, now)
        for worker, other in ((prefill, decode), (decode, prefill)):
            if isinstance(pair, Handoff):
                fits.add(worker.name)
            elif pair.reason.startswith("fingerprint."):
                row = {"worker": worker.name, "other": other.name, "reason": pair.reason}
                differs.setdefault(worker.name, row)
    return [row for name, row in sorted(differs.items()) if name not in fits]


def cut_off(brain: Brain, now: float) -> set[str]:
    """Usable workers that could exchange KV with others, if pages got from store to store."""
    usable = brain.fleet.workers.usable(now) if len(brain.fleet.ways) else ()
    fits, cut = set[str](), set[str]()
    for decode in (worker for worker in usable if worker.role.decodes):
        for prefill in _of(usable, decode):
            pair = brain.fleet.pair(prefill, decode, now)
            if isinstance(pair, Handoff) and not brain.fleet.ways.is_broken((prefill.store, decode.store)):
                fits |= {prefill.name, decode.name}
            elif isinstance(pair, Handoff) or pair.cut:
                cut |= {prefill.name, decode.name}
    return cut - fits


def _member(usable: bool, member: Member[WorkerInfo] | Member[StoreInfo], now: float) -> dict[str, object]:
    return {
        "name": member.info.name,
        "incarnation": member.info.incarnation,
        "ready": usable,
        "left": member.left,
        "silent_s": round(now - member.heard_s, 3),
    }


def _worker(brain: Brain, member: Member[WorkerInfo], now: float) -> dict[str, object]:
    name = member.info.name
    return _member(brain.fleet.workers.is_usable(name, now), member, now) | {
        "role": member.info.role.value,
        "model": member.info.model,
        "store": member.info.store,
        "draining": member.draining,
        "breaker": brain.outcomes.breakers.of(name).state.value,
        "kv_dtype": member.info.engine.fingerprint.format.dtype,
        "weights": member.info.engine.fingerprint.weights,
        "tensor_parallel": member.info.engine.tensor_parallel,
        "block_tokens": member.info.engine.block_tokens,
        "queued_prefill_tokens": brain.loads.queued_tokens[name],
        "decode_sequences": brain.loads.sequences[name],
        "reserved_kv_tokens": brain.loads.kv_tokens[name],
    }
