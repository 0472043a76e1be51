"""Ties a process's life to its parent's, so that a killed supervisor leaves nothing running. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "KVRELAY_PARENT_PID"
"""Set by the process that starts a child; the child takes it out of its environment."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, with_signal: int) -> None:
    """Ask the kernel to send this process ``with_signal`` when ``parent`` dies; at once when it is dead already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def die_with_starter(with_signal: int = signal.SIGTERM) -> None:
    """``die_with_parent`` in a process that kvrelay started; nothing in one that a person started."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        die_with_parent(int(parent), with_signal)
