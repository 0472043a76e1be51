"""A file of results to which every stage of a benchmark adds its own, so that one alone can be measured again."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

Found = dict[str, Any]


def read(results: Path) -> Found:
    """What is known so far, by stage."""
    known: Found = json.loads(results.read_text()) if results.exists() else {}
    return known


def keep(results: Path, stage: str, figures: Found) -> Found:
    """Add ``figures``, with when and where they were measured; all that is known then."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = read(results) | {"machine": describe(), stage: {"measured": now, **figures}}
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(found, indent=1) + "\n")
    return found
