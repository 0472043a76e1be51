"""Temporary folders whose owner may be killed: the next start removes what the dead have left.

A living owner holds a lock in its folder, which the kernel takes away when it dies: no process id is guessed at. This
must never remove a folder without such a file, of another user, or of a process that lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = "owner.lock"


class Scratch:
    """A fresh folder that only this user may open, below ``parent``; its name starts with ``prefix``."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        sweep(prefix, parent or tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unready = self.path / f".{_LOCK}"
        self._lock = os.open(unready, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unready.rename(self.path / _LOCK)  # locked before it has its name: a sweep never finds it free

    def __repr__(self) -> str:
        return f"<Scratch {self.path}>"

    def remove(self) -> None:
        """Remove the folder with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def keep(self) -> None:
        """Leave the folder for a person to read: no later start removes it."""
        (self.path / _LOCK).unlink(missing_ok=True)
        os.close(self._lock)


@contextlib.contextmanager
def scratch(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """A ``Scratch`` folder for the length of the block."""
    folder = Scratch(prefix, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def sweep(prefix: str, parent: str) -> None:
    """Remove folders below ``parent`` whose owners have died without doing so."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # of another user, or gone meanwhile
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, an OSError, while the owner lives
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
