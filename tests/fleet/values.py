"""Workers and stores as values, for tests of the brain and of the router."""

from __future__ import annotations

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, Plan
from kvrelay.identity import NAMING_VERSION
from kvrelay.types import Engine, Fingerprint, PageFormat, PageName, Role, StoreInfo, WorkerInfo


def fingerprint(weights: str = "w1", dtype: str = "bfloat16") -> Fingerprint:
    fmt = PageFormat(layers=2, kv_heads=1, head_dim=8, dtype=dtype, page_tokens=4)
    return Fingerprint(weights=weights, weights_epoch=0, format=fmt, naming=NAMING_VERSION, engine="vllm 0.32.0")


def engine(
    weights: str = "w1", *, dtype: str = "bfloat16", kv_tokens: int = 4096, max_model_len: int = 1 << 16
) -> Engine:
    return Engine(
        fingerprint=fingerprint(weights, dtype),
        kv_tokens=kv_tokens,
        block_tokens=16,
        max_model_len=max_model_len,
        max_batched_tokens=64,
    )


def worker(
    name: str,
    role: Role = Role.BOTH,
    *,
    url: str = "http://127.0.0.1:1",
    store: str = "s1",
    weights: str = "w1",
    incarnation: str = "i1",
    model: str = "tiny",
    kv_tokens: int = 4096,
    dtype: str = "bfloat16",
    max_model_len: int = 1 << 16,
) -> WorkerInfo:
    return WorkerInfo(
        name=name,
        incarnation=incarnation,
        role=role,
        url=url,
        model=model,
        store=store,
        engine=engine(weights, kv_tokens=kv_tokens, dtype=dtype, max_model_len=max_model_len),
    )


def store(name: str = "s1", address: str = "127.0.0.1:9001", incarnation: str = "i1") -> StoreInfo:
    return StoreInfo(name=name, incarnation=incarnation, address=address, capacity_bytes=1 << 20)


def names(*numbers: int) -> list[PageName]:
    """Page names that are as good as any."""
    return [PageName(number.to_bytes(16, "little")) for number in numbers]


def begun(brain: Brain, ask: Ask, now: float = 0.0) -> Plan:
    """The plan of a request that gets in at once."""
    plan = brain.begin(ask, now)
    assert isinstance(plan, Plan), f"{plan!r} where a plan was expected"
    return plan
