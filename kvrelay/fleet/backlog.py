"""Prompts that one worker was promised and has not computed yet. It must never depend on the worker telling of each."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from kvrelay.policy.patience import stands_back
from kvrelay.types import Value


class Promise(Value, frozen=True, kw_only=True):
    """One prompt in a backlog."""

    seconds: float
    """Predicted time to compute it."""
    step_s: float = 0.0
    """Time of one of the prompt's steps, after each of which it lets much shorter prompts pass; 0: it never does."""
    expires: bool = False
    """No message will tell when the prompt is computed: it counts as computed once its seconds have passed."""


class Backlog:
    """A worker computes prompts in the order of their arrival, so only the first one gets shorter with time."""

    def __init__(self) -> None:
        self._promises: OrderedDict[str, Promise] = OrderedDict()
        self._sum_s = 0.0
        self._head_since_s = 0.0
        """When the first of them was begun, as far as is known."""
        self._overtaken: set[str] = set()

    def __repr__(self) -> str:
        return f"<Backlog {len(self._promises)} prompts, {self._sum_s:.3f} s>"

    def __len__(self) -> int:
        return len(self._promises)

    def __contains__(self, key: str) -> bool:
        return key in self._promises

    def keys(self) -> set[str]:
        return set(self._promises)

    def add(self, key: str, promise: Promise, now: float) -> None:
        if not self._promises:
            self._head_since_s = now
        self._promises[key] = promise
        self._sum_s += promise.seconds

    def computed(self, key: str, now: float) -> None:
        """It is done; a key that is not here (any more) changes nothing."""
        if key not in self._promises:
            return
        head = next(iter(self._promises))
        if head != key and self._passes(self._promises[key], self._promises[head]):
            self._head_since_s = min(now, self._head_since_s + self._promises[key].seconds)
        self._overtaken.update(self._no_longer_before(key))
        self.withdrawn(key, now)

    def _no_longer_before(self, key: str) -> Iterator[str]:
        """Prompts that came before ``key`` and take no longer: they do not let it pass."""
        for other, promise in self._promises.items():
            if other == key:
                return
            if promise.seconds <= self._promises[key].seconds:
                yield other

    def is_overtaken(self, key: str) -> bool:
        """Whether one that came later, and takes as long at least, was computed before ``key``."""
        return key in self._overtaken

    def withdrawn(self, key: str, now: float) -> None:
        """The prompt was held back or given up, and delayed no other one. A key that is not here changes nothing."""
        if key not in self._promises:
            return
        if next(iter(self._promises)) == key:
            self._head_since_s = now
        del self._promises[key]
        self._overtaken.discard(key)
        # Anew, and not less what has gone: sums of floats would drift.
        self._sum_s = sum(promise.seconds for promise in self._promises.values())

    @staticmethod
    def _passes(prompt: Promise, head: Promise) -> bool:
        """Whether ``head`` stood still while ``prompt``, which came later, was computed."""
        return head.step_s > 0.0 and stands_back(head.seconds, prompt.seconds)

    def passed(self, own_s: float, now: float) -> int:
        """How many of the promised prompts stand back for one that comes now and takes ``own_s``: those that
        ``wait_s`` does not count."""
        self._expire(now)
        if not self._promises or self._head_left_s(now) < 0.0:
            return 0
        head, *others = self._promises.values()
        lefts_s = [(head.step_s, self._head_left_s(now)), *((other.step_s, other.seconds) for other in others)]
        return sum(step_s > 0.0 and stands_back(left_s, own_s) for step_s, left_s in lefts_s)

    def wait_s(self, now: float, own_s: float = math.inf) -> float:
        """Seconds by which the promised prompts delay one that comes now and takes ``own_s`` itself.

        Much longer ones stand back for it; the one that is being computed ends its step before, of which half is over
        on average. With infinite ``own_s`` all are computed in the order of their arrival, and so they are behind one
        that is late.
        """
        if self._promises:
            self._expire(now)
        if not self._promises:
            return 0.0
        head = next(iter(self._promises.values()))
        left_s = self._head_left_s(now)
        if left_s < 0.0:
            # Late: what takes longer than was predicted is expected to take as long again. Its worker may hang.
            return -left_s + self._sum_s - head.seconds
        if own_s == math.inf:
            return self._sum_s - head.seconds + left_s
        first_s = min(left_s, head.step_s / 2) if head.step_s and stands_back(left_s, own_s) else left_s
        others = islice(self._promises.values(), 1, None)
        return first_s + sum([other.seconds for other in others if not stands_back(other.seconds, own_s)])

    def _head_left_s(self, now: float) -> float:
        """Negative: it is late."""
        return next(iter(self._promises.values())).seconds - max(0.0, now - self._head_since_s)

    def _expire(self, now: float) -> None:
        while self._promises:
            key, head = next(iter(self._promises.items()))
            if not head.expires or now - self._head_since_s < head.seconds:
                return
            self.withdrawn(key, self._head_since_s + head.seconds)
