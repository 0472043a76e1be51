"""An operator's command to a router, over its control port: what is to be done with a worker, and how far that is."""

from __future__ import annotations

from kvrelay.protocol.message import Message


class DrainWorker(Message, frozen=True, kw_only=True):
    """Give ``worker`` no new work (or, ``undo``: give it work again). Answered with ``Remaining``, or ``Rejected``."""

    worker: str
    undo: bool = False
    force: bool = False
    """Also when nobody else could answer the requests that come."""


class AskRemaining(Message, frozen=True, kw_only=True):
    """What does ``worker`` still do for this router? Answered with ``Remaining``, or ``Rejected``."""

    worker: str


class HandOver(Message, frozen=True, kw_only=True):
    """The streams of a draining ``worker`` go on elsewhere. Answered with ``Remaining``, or ``Rejected``."""

    worker: str


class Remaining(Message, frozen=True, kw_only=True):
    """What a worker still does for one router."""

    worker: str
    incarnation: str
    draining: bool
    """It gets no new work."""
    gone: bool
    """It said goodbye, or was silent for so long that it counts as dead."""
    prompts: int
    """Prompts that it computes for others."""
    answers: int
    """Sequences that it writes, or is about to."""
    transfers: int
    """Hand-offs of prompts that it computed whose pages are not all with their reader yet."""
    routers: int = 1
    """Routers that share this one's port, itself included (``router.replicas``); each has requests of its own there."""

    @property
    def is_empty(self) -> bool:
        """Nobody would miss the worker."""
        return self.gone or self.prompts + self.answers + self.transfers == 0


class AskReady(Message, frozen=True, kw_only=True):
    """Whom does this router give work? Answered with ``Ready``."""


class Ready(Message, frozen=True, kw_only=True):
    """The answer to ``AskReady``."""

    serving: bool
    """Requests are answered, or would be, had nobody drained who could answer them."""
    why: str
    """What is not as meant; empty when all is."""
    members: list[str]
    """Workers and stores that are heard and get work."""
    draining: list[str] = []
    """Workers that are heard and get none, since somebody wants them empty."""


OperatorMessage = DrainWorker | AskRemaining | HandOver | Remaining | AskReady | Ready
