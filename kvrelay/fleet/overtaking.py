"""How much KV small requests may take while they pass a request that waits for KV. It must never let them pass it for
ever: hundreds of small ones would take every block that is freed for it."""

from __future__ import annotations

CRUMB_SHARE = 0.02
"""Share of D's KV that one passing request may take at most, since the queued ones may wait for KV."""
CRUMBS_SHARE = 0.1
"""Share of D's KV that all passing requests may take together, while the request that they pass waits for KV."""


class Overtaking:
    """For each request that waits for KV: the KV tokens of the requests that were let in before it."""

    def __init__(self) -> None:
        self._passed: dict[str, int] = {}
        """KV tokens of those that went before each request that lacked KV."""

    def __repr__(self) -> str:
        return f"<Overtaking, {len(self._passed)} wait for KV>"

    def lacks_kv(self, request_id: str) -> None:
        """There was no KV for it; to say so again changes nothing."""
        self._passed.setdefault(request_id, 0)

    def is_passed(self, request_id: str) -> bool:
        """Whether it lacked KV, and waits."""
        return request_id in self._passed

    def allows(self, head: str, kv_tokens: int, capacity_tokens: float) -> bool:
        """Whether a request of ``kv_tokens`` may go before ``head``, at a D that has ``capacity_tokens``."""
        together = self._passed.get(head)
        is_crumb = kv_tokens <= CRUMB_SHARE * capacity_tokens
        return is_crumb and (together is None or together + kv_tokens <= CRUMBS_SHARE * capacity_tokens)

    def went_before(self, head: str, kv_tokens: int) -> None:
        """A request of ``kv_tokens`` was let in before ``head``."""
        if head in self._passed:
            self._passed[head] += kv_tokens

    def leave(self, request_id: str) -> None:
        """It does not wait any more."""
        self._passed.pop(request_id, None)
