"""What a long benchmark says while it runs: one line at a time, with the seconds since it began."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]


def say_with_clock(stage: str) -> Say:
    """Prints each line behind the stage's name and its age."""
    begin_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{stage} {time.monotonic() - begin_s:4.0f} s] {line}", flush=True)

    return say
