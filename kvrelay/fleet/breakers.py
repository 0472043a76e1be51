"""The breakers of all workers. It must never keep one longer than its worker's incarnation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvrelay.policy.breaker import Breaker, State


class Breakers:
    """Circuit breakers by worker; a worker that never failed has none."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}
        self.opened = 0
        """How often one was opened by a worker that had been thought well."""

    def __repr__(self) -> str:
        kept = sorted(name for name, breaker in self._breakers.items() if breaker.state is not State.CLOSED)
        return f"<Breakers open: {', '.join(kept) or 'none'}>"

    def __len__(self) -> int:
        """Workers that failed and have not succeeded since: all others get requests."""
        return len(self._breakers)

    def of(self, worker: str) -> Breaker:
        return self._breakers.get(worker, Breaker())

    def allows(self, worker: str, now: float) -> bool:
        breaker = self._breakers.get(worker)
        return breaker is None or breaker.allows(now)

    def wait_s(self, workers: Iterable[str], now: float) -> float:
        """Seconds until the first of ``workers`` may be tried; 0 without any."""
        return min((self.of(worker).wait_s(now) for worker in workers), default=0.0)

    def are_open(self, workers: Sequence[str]) -> list[bool]:
        """Whether each was found to fail, so that what is sent there now shows how it is."""
        return [worker in self._breakers and self._breakers[worker].state is not State.CLOSED for worker in workers]

    def sent(self, worker: str, key: str) -> None:
        if worker in self._breakers:
            self._breakers[worker] = self._breakers[worker].sent(key)

    def succeeded(self, worker: str, key: str, asked_s: float) -> None:
        """It answered the request ``key``, asked at ``asked_s``, if it was by a refusal that blames the request."""
        if worker in self._breakers and self._breakers[worker].succeeded(key, asked_s) == Breaker():
            del self._breakers[worker]

    def failed(self, worker: str, key: str, now: float) -> None:
        """It refused the request ``key`` with a 5xx, hung up or could not be reached."""
        before = self.of(worker)
        after = self._breakers[worker] = before.failed(key, now)
        self.opened += before.state is State.CLOSED and after.state is State.OPEN

    def gave_up(self, worker: str, key: str, now: float) -> None:
        """The request ``key`` there ended before it could succeed or fail."""
        if worker in self._breakers:
            self._breakers[worker] = self._breakers[worker].gave_up(key, now)

    def forget(self, worker: str) -> None:
        """It was restarted."""
        self._breakers.pop(worker, None)

    def keep_only(self, workers: Iterable[str]) -> None:
        """Drop those of workers that nobody knows any more."""
        for worker in self._breakers.keys() - set(workers):
            del self._breakers[worker]
