"""The calls of one request to its decode workers. It must never leave one open after ``drop``."""

from __future__ import annotations

from kvrelay.policy.loss import LossReason
from kvrelay.router.upstream import Call, Reply, Upstream


class Decodes:
    """The calls to decode workers for one request: one at a time, or one for each choice that goes on."""

    def __init__(self, upstream: Upstream, request_id: str) -> None:
        self._upstream = upstream
        self._id = request_id
        self._opening: Call | None = None
        self._replies: list[Reply] = []
        self._reason: LossReason | None = None
        """Why the brain gave the worker up."""

    def __repr__(self) -> str:
        return f"<Decodes of {self._id}, {len(self._replies)} replies>"

    def __len__(self) -> int:
        return len(self._replies)

    async def open(self, url: str, body: bytes, ending: str = "") -> Reply:
        """Send ``body``; the reply once its status is known. Raises ``Lost``, ``Exhausted``."""
        self._opening = self._upstream.call(url, body, request_id=self._id + ending)
        try:
            reply = await self._opening.reply()
        finally:
            self._opening = None
        self._replies.append(reply)
        return reply

    def abandon(self, reason: LossReason) -> None:
        """The brain gives the worker up."""
        self._reason = reason
        self.drop()

    def take_reason(self, otherwise: LossReason) -> LossReason:
        """Why the worker was lost; what its connection showed, unless the brain had its own reason."""
        reason, self._reason = self._reason or otherwise, None
        return reason

    def drop(self) -> None:
        """Hang up."""
        if self._opening is not None:
            self._opening.abandon()
        replies, self._replies = self._replies, []
        for reply in replies:
            reply.close()
