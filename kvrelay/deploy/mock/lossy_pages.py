"""A worker's page log of which messages get lost on demand: the routers have to notice the gap."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvrelay.deploy.mock.faults import Condition
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.feed import PageEvents, PageSnapshot


class LossyPages:
    """``feed.Pages`` of a mock worker that leaves messages out while its condition says so."""

    def __init__(self, log: PageLog, condition: Condition) -> None:
        self._log = log
        self._condition = condition

    def __repr__(self) -> str:
        return f"<LossyPages of {self._log!r}>"

    def watch(self, changed: Callable[[], None]) -> None:
        self._log.watch(changed)

    def follow(self, after: int) -> Iterator[PageEvents | PageSnapshot | None]:
        for message in self._log.follow(after):
            if message is None or not self._condition.loses_event():
                yield message
