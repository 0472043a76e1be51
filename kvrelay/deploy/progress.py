"""How far a starting process is, read from the lines that it logs. A line it does not know changes nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvrelay.types import Value

READY_MARK = "kvrelay ready:"
"""Starts the line that every kvrelay process logs once it serves."""
_READ_BYTES = 1 << 20


class Progress(Value, frozen=True, kw_only=True):
    """A step of a start: what goes on now, and the fraction of the usual time that has passed."""

    fraction: float
    text: str

    @property
    def ready(self) -> bool:
        return self.fraction >= 1.0


STARTING = Progress(fraction=0.0, text="starting")

_MILESTONES: tuple[tuple[str, float, str], ...] = (
    # Fractions: a warm start of 35 s of one core, vLLM 0.32.0; most of it are three processes that import torch.
    ("kvrelay engine:", 0.02, "importing vLLM"),
    ("non-default args", 0.25, "reading the model's configuration"),
    ("Resolved architecture", 0.32, "starting the engine process"),
    ("Initializing a V1 LLM engine", 0.55, "starting the model process"),
    ("Starting to load model", 0.80, "loading weights"),
    ("Loading weights took", 0.84, "allocating the KV cache"),
    ("KV cache size: ", 0.90, "warming up"),
    ("init engine (profile", 0.93, "starting the API server"),
    ("Starting vLLM server", 0.97, "waiting for its health check"),
    (READY_MARK, 1.0, "serving"),
)
_ERROR = re.compile(r"(?:^|\] |\) |\.)((?:error|[A-Z]\w*(?:Error|Exception)): \S.*)")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")


def milestone(line: str) -> Progress | None:
    """The step that ``line`` announces, or None."""
    for mark, fraction, text in reversed(_MILESTONES):
        if mark in line:
            size = _KV_TOKENS.search(line)
            return Progress(fraction=fraction, text=f"{text}; KV cache of {size[1]} tokens" if size else text)
    return None


class LogFollower:
    """Follows one growing log file from its present end. What cannot be read says nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = STARTING
        self._begin = self._offset = path.stat().st_size if path.exists() else 0
        self._partial = b""

    def __repr__(self) -> str:
        return f"<LogFollower {self.path.name}, {self.progress.text}>"

    def read(self) -> Progress:
        """Take in what was written since the last call; the furthest step so far."""
        data = _read(self.path, self._offset)
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._advance(line.decode(errors="replace"))
        return self.progress

    def errors(self, count: int) -> list[str]:
        """Lines that name an exception or say ``error:``, of the last MiB since the beginning: the first one, usually
        the cause, and the last ones."""
        text = _read(self.path, self._begin, last=True).decode(errors="replace")
        found = dict.fromkeys(match[1] for line in text.splitlines() if (match := _ERROR.search(line)))
        return _first_and_last(list(found), count)

    def _advance(self, line: str) -> None:
        step = milestone(line)
        if step is not None and step.fraction > self.progress.fraction:
            self.progress = step


def _read(path: Path, begin: int, *, last: bool = False) -> bytes:
    """A MiB from ``begin`` on, or the ``last`` one after it."""
    try:
        with path.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - _READ_BYTES) if last else begin)
            return file.read(_READ_BYTES)
    except OSError:
        return b""


def _first_and_last(lines: list[str], count: int) -> list[str]:
    return lines if len(lines) <= count else [lines[0], *lines[len(lines) - count + 1 :]]
