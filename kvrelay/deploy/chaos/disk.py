"""A small file system that is full for a while. It must never fill the one that the machine lives on."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from pathlib import Path

from kvrelay.deploy.chaos.mending import Unmended, mend_each
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost, Misconfigured

_FILE = "kvrelay-chaos.full"
_PIECE_BYTES = 1 << 16


class DiskVictims:
    """The file system of one folder, where logs and ``router.learned_file`` are."""

    def __init__(self, folder: Path) -> None:
        """Raises ``Misconfigured`` when that is the root's."""
        if not folder.is_dir():
            raise Misconfigured(f"{folder} is no folder; name one of a small file system that may be filled")
        if folder.stat().st_dev == Path("/").stat().st_dev:
            raise Misconfigured(
                f"{folder} is on the root file system; put what kvrelay writes on one of its own and name that, "
                "e.g. as root: mount -t tmpfs -o size=64m tmpfs FOLDER"
            )
        self._file = folder / _FILE

    def __repr__(self) -> str:
        return f"<DiskVictims {self._file.parent}, {'full' if self._file.exists() else 'whole'}>"

    async def targets(self) -> list[Target]:
        return [Target(name=str(self._file.parent), kind="disk", deeds=(Deed.FULL_DISK,))]

    async def begin(self) -> None: ...

    async def hurt(self, name: str, deed: Deed) -> None:
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Lost(f"{self._file} cannot be made: {error.strerror}") from error
        try:
            _fill(descriptor, shutil.disk_usage(name).free)
        finally:
            os.close(descriptor)

    async def mend(self, name: str) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            raise Lost(f"{self._file} cannot be removed: {error.strerror}") from error

    async def end(self) -> list[Unmended]:
        return await mend_each([str(self._file.parent)], self.mend, lambda _: f"rm -f {shlex.quote(str(self._file))}")


def _fill(descriptor: int, free_bytes: int) -> None:
    """Take all room there is: at once as far as it is known, then byte by byte."""
    with contextlib.suppress(OSError):
        os.posix_fallocate(descriptor, 0, max(1, free_bytes))
    os.lseek(descriptor, 0, os.SEEK_END)
    size_bytes = _PIECE_BYTES
    while size_bytes:
        try:
            os.write(descriptor, bytes(size_bytes))
        except OSError:
            size_bytes //= 2
