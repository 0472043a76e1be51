"""Whose batch goes next among the pushes to one peer. It must never let a push with much to send hold up the others."""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.store.push import Push


class Turns:
    """Pushes by transfer, those that were served longest ago first.

    A decode worker waits for a hand-off from one layer to the next; bulk copies have time, and share one place.
    """

    def __init__(self) -> None:
        self._pushes: dict[str, Push] = {}

    def __repr__(self) -> str:
        return f"<Turns of {list(self._pushes)}>"

    def __len__(self) -> int:
        return len(self._pushes)

    def __iter__(self) -> Iterator[Push]:
        """As they are now: what is served, added or removed meanwhile changes the next look."""
        return iter(list(self._pushes.values()))

    @property
    def places(self) -> int:
        """Batches after which everyone who has something to send had a turn: one for each hand-off, and one for all
        bulk copies together."""
        are_bulk = [push.is_bulk for push in self._pushes.values() if push.is_sending]
        return are_bulk.count(False) + (True in are_bulk)

    def get(self, transfer: str) -> Push | None:
        return self._pushes.get(transfer)

    def add(self, push: Push) -> None:
        """Behind those that wait."""
        self._pushes[push.transfer.id] = push

    def remove(self, push: Push) -> None:
        del self._pushes[push.transfer.id]

    def served(self, push: Push) -> None:
        """It got a batch: the others come first now. One bulk copy is served for all of them."""
        if push.is_bulk:
            for other in [other for other in self._pushes.values() if other.is_bulk and other is not push]:
                self._move_back(other)
        self._move_back(push)

    def _move_back(self, push: Push) -> None:
        self._pushes[push.transfer.id] = self._pushes.pop(push.transfer.id)
