"""How a worker was lost to a request that it had. The words are labels of metrics and stand in timelines."""

from __future__ import annotations

from enum import StrEnum


class LossReason(StrEnum):
    """How the loss of a worker showed."""

    RESET = "reset"
    """The worker's connection broke, or ended early."""
    FAILED = "failed"
    """The worker answered with a failure, or with bytes that cannot be read."""
    UNASKED = "unasked"
    """The worker was not reached, or turned the request away: it never ran it."""
    GAVE_UP = "gave_up"
    """The worker's stream ended before the answer did: it aborted what it ran."""
    SILENT = "silent"
    """The worker stopped: no piece of the answer, and no progress with anything else."""
    GONE = "gone"
    """The worker said goodbye, was started again, or showed no sign of health for several leases."""
    FORGOTTEN = "forgotten"
    """The worker makes progress with other requests and none with this one. This is no failure of the worker."""
    DRAINED = "drained"
    """The worker drains, and the answer was moved while it was written. This is no loss."""


DEADLY = frozenset({LossReason.RESET, LossReason.FAILED, LossReason.SILENT})
"""Reasons that the request itself may have caused: the worker hung up, failed inside, or stopped. A worker that was
never reached, said goodbye or had no room was not harmed by it."""
