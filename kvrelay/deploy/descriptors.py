"""How many files and connections a process may have open. It must never lower the limit."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Let this process have as many as its user may have; the usual limit, 1,024, is there for programs that call
    ``select``. A system that allows fewer than it says keeps the limit that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
