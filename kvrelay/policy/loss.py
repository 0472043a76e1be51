"""How a worker was lost to a request that it had. The words are labels of metrics and stand in timelines."""

from __future__ import annotations

from enum import StrEnum


class LossReason(StrEnum):
    """How the loss of a worker showed."""

    RESET = "reset"
    """Its connection broke, or ended early."""
    FAILED = "failed"
    """It answered that it failed, or what nobody can read."""
    UNASKED = "unasked"
    """It was not reached, turned the request away, or gave it up unasked: it had nothing to do with it."""
    GAVE_UP = "gave_up"
    """Its stream came to an end before the answer did: it aborted what it ran."""
    SILENT = "silent"
    """It stood still: no word of the answer, and no progress with anything else."""
    GONE = "gone"
    """It said goodbye, started anew, or showed no sign of health for several leases."""
    FORGOTTEN = "forgotten"
    """It makes progress with others, and none with this one. It is not to blame."""
    DRAINED = "drained"
    """It is to become empty, and was left while it wrote. That is no loss."""


DEADLY = frozenset({LossReason.RESET, LossReason.FAILED, LossReason.SILENT})
"""Those that may be the request's doing: its worker hung up, failed inside, or stands still. One that was never
reached, said goodbye or has no room is not among them."""
