"""An event counter by which a writer wakes its store without sending a message. It carries no data."""

from __future__ import annotations

import contextlib
import os


class Doorbell:
    """An eventfd, owned. Ringing costs one system call and never blocks; rings between two answers count as one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def __repr__(self) -> str:
        return f"<Doorbell {'closed' if self.fd < 0 else self.fd}>"

    def ring(self) -> None:
        """Wake the store."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.fd, 1)

    def answer(self) -> int:
        """How often it rang since the last answer."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        # A forward thread may still hold the doorbell of a link that broke: the last holder closes it, so that
        # no ring ever goes to a descriptor number that was taken over by another file.
        self.close()
