"""Says, right after an installation, whether vLLM can start here, and what to do when it cannot."""

from __future__ import annotations

import ctypes
import importlib
import sys

NEEDS = (
    ("libnuma.so.1", "vLLM's CPU kernels need it: apt-get install libnuma1"),
    ("libstdc++.so.6", "torch needs it: apt-get install libstdc++6"),
)
"""Shared libraries of the system that no Python package brings."""


def missing_libraries() -> list[str]:
    """A sentence for each library that cannot be loaded."""
    return [f"{name} is missing; {advice}" for name, advice in NEEDS if not _loads(name)]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def wrong_torch() -> list[str]:
    """A sentence when the installed torch is not one that works on a CPU alone."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError, ValueError) as error:
        advice = "make pip find the CPU build of torch (version 2.13.0+cpu), e.g. with PIP_FIND_LINKS, then make clean"
        return [f"torch cannot be imported ({error}); {advice}"]
    return []


if __name__ == "__main__":
    problems = missing_libraries() or wrong_torch()
    sys.exit("\n".join(problems) or 0)
