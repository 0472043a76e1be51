"""Where kvrelay keeps what it can make again: converted models and their digests, and what routers learned."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/kvrelay``, or ``~/.cache/kvrelay``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kvrelay"


def models_root() -> Path:
    return cache_root() / "models"


def learned_root() -> Path:
    return cache_root() / "learned"
