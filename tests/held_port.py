"""A port at which nobody listens, and that nobody else gets meanwhile: one that was merely closed may be anybody's."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Who connects is refused. A listener of this process may bind it, as ``bind_tcp`` does, and close it again."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        yield port
