"""Sole use of a folder, for as long as its holder lives: the kernel ends it with the process.

It must never be had by two processes, and its file never stays behind a holder that ends in peace.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvrelay.errors import Misconfigured


class FolderLock:
    """The lock file of a folder, held from here until ``release``. Raises ``Misconfigured`` when another has it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = _hold(path)
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def __repr__(self) -> str:
        return f"<FolderLock {self._path}>"

    def release(self) -> None:
        """Let others have the folder."""
        self._path.unlink(missing_ok=True)
        os.close(self._lock)


def _hold(path: Path) -> int:
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(lock, 20).decode() or "that starts now"
            os.close(lock)
            raise Misconfigured(
                f"{path.parent} is in use by process {holder}; stop it, or set KVRELAY_RUN_DIR to another folder"
            ) from error
        if _is_named(lock, path):
            return lock
        os.close(lock)  # its holder let go between the two calls: what was locked is a file without a name


def _is_named(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
