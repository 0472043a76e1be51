"""What the fleet looks like to an operator. It must never call a fleet healthy that cannot answer a request."""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.workers import Handoff, Member, NoHandoff
from kvrelay.types import Role, StoreInfo, Value, WorkerInfo


class Health(Value, frozen=True, kw_only=True):
    """JSON-ready; ``status`` is ok, degraded (serving, not as meant) or unavailable; ``why`` says what to do."""

    status: str
    why: str
    workers: list[dict[str, object]]
    stores: list[dict[str, object]]
    unpaired: list[dict[str, str]]
    """Pairs of workers that cannot hand KV over, with the field that differs."""
    in_flight: int

    @property
    def serving(self) -> bool:
        return self.status != "unavailable"


def examine(brain: Brain, now: float) -> Health:
    """Health of the fleet at ``now``."""
    usable = brain.fleet.workers.usable(now)
    unpaired = list(_unpaired(brain, usable, now))
    status, why = _judge(brain, usable, unpaired, now)
    return Health(
        status=status,
        why=why,
        workers=[_worker(brain, member, now) for member in brain.fleet.workers],
        stores=[
            _member(brain.fleet.stores.is_usable(member.info.name, now), member, now) for member in brain.fleet.stores
        ],
        unpaired=unpaired,
        in_flight=brain.in_flight,
    )


def _judge(brain: Brain, usable: list[WorkerInfo], unpaired: list[dict[str, str]], now: float) -> tuple[str, str]:
    if not any(worker.role.decodes for worker in usable):
        return "unavailable", "no worker with role decode or both is ready; start one, or look at its log"
    for worker in usable:
        if not brain.fleet.stores.is_usable(worker.store, now):
            return "degraded", _no_store(brain, worker)
    if unpaired:
        return "degraded", "some workers cannot hand KV to each other; see unpaired for the field that differs"
    alone = _alone(brain, usable, now)
    if alone:
        return "degraded", f"no prefill worker is ready for {', '.join(alone)}; start one, or look at its log"
    return "ok", ""


def _no_store(brain: Brain, worker: WorkerInfo) -> str:
    if brain.fleet.stores.get(worker.store) is not None:
        return f"store {worker.store!r} of worker {worker.name!r} is not heard; see its log"
    return (
        f"worker {worker.name!r} names the store {worker.store!r}, which no store here is called; "
        "start that store with this router's --router, or give the worker the right --store-name"
    )


def _alone(brain: Brain, usable: list[WorkerInfo], now: float) -> list[str]:
    """Decode workers that compute every prompt themselves."""
    return [
        decode.name
        for decode in usable
        if decode.role is Role.DECODE
        if not any(isinstance(brain.fleet.pair(prefill, decode, now), Handoff) for prefill in _of(usable, decode))
    ]


def _of(usable: list[WorkerInfo], decode: WorkerInfo) -> list[WorkerInfo]:
    """Workers that prefill the model of ``decode``."""
    return [worker for worker in usable if worker.role.prefills and worker.model == decode.model]


def _unpaired(brain: Brain, usable: list[WorkerInfo], now: float) -> Iterator[dict[str, str]]:
    for decode in (worker for worker in usable if worker.role.decodes):
        for prefill in _of(usable, decode):
            pair = brain.fleet.pair(prefill, decode, now)
            if isinstance(pair, NoHandoff) and pair.reason != "colocated":
                yield {"prefill": prefill.name, "decode": decode.name, "reason": pair.reason}


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
        "breaker": brain.outcomes.breakers.of(name).state.value,
        "queued_prefill_tokens": brain.loads.queued_tokens[name],
        "decode_sequences": brain.loads.sequences[name],
        "reserved_kv_tokens": brain.loads.kv_tokens[name],
    }
