"""Which mock workers and stores there are, and what they are called: as ``kvrelay up`` calls real ones."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvrelay.deploy.mock.faults import Faults
from kvrelay.errors import Misconfigured
from kvrelay.types import Role, Value

MOST = 256
_SIZE = re.compile(r"(\d{1,4})x(\d{1,4})")


class WorkerPlan(Value, frozen=True, kw_only=True):
    """Which mock worker to run."""

    name: str
    role: Role
    store: int = 0
    """Number of its node's store."""
    faults: Faults = Faults()


class MockNames(Value, frozen=True, kw_only=True):
    """All members that one process pretends to be."""

    workers: tuple[WorkerPlan, ...]
    stores: tuple[str, ...]

    def plans(self, faults: Mapping[str, Faults]) -> tuple[WorkerPlan, ...]:
        """The workers, some of them with ``faults``. Raises ``Misconfigured`` for names of nobody."""
        known = {worker.name for worker in self.workers}
        if strangers := faults.keys() - known:
            raise Misconfigured(
                f"no mock worker is called {', '.join(strangers)}; there are {', '.join(sorted(known))}"
            )
        return tuple(
            WorkerPlan(name=each.name, role=each.role, store=each.store, faults=faults.get(each.name, each.faults))
            for each in self.workers
        )


def parse_size(flag: str, text: str) -> tuple[int, int]:
    """``16x8``: sixteen prefill and eight decode workers. Raises ``Misconfigured``."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise Misconfigured(f"{flag} {text} is not PxD, as in 16x16: prefill workers and decode workers")
    return int(match[1]), int(match[2])


def mock_names(prefill: int, decode: int, colocated: int, *, stores: int, prefix: str = "") -> MockNames:
    """Names of the mock workers. With two stores, decode workers are at the second one. Raises ``Misconfigured``."""
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: colocated}
    if not 0 < sum(counts.values()) <= MOST:
        raise Misconfigured(f"one process pretends to be 1 to {MOST} workers; start another one for more")
    return MockNames(
        workers=tuple(
            WorkerPlan(name=f"{prefix}{role}-{number}", role=role, store=stores - 1 if role is Role.DECODE else 0)
            for role, count in counts.items()
            for number in range(count)
        ),
        stores=tuple(f"{prefix}store-{number}" for number in range(stores)),
    )
