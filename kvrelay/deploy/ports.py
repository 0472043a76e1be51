"""TCP ports of this machine: free ones, and who holds a taken one."""

from __future__ import annotations

import errno
import random
import socket

import psutil

from kvrelay.errors import Misconfigured

_FIRST, _LAST = 20_000, 32_000
"""Below Linux's ephemeral range (32768 and up): no outgoing connection takes the port before its server binds it."""
_TRIES = 200
CONTROL_PORT = "router.control_port in the configuration file (0: any)"
"""How to choose another control port."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now. Raises ``Misconfigured`` when none is found."""
    for _attempt in range(_TRIES):
        port = random.randint(_FIRST, _LAST)
        if is_free(host, port):
            return port
    raise Misconfigured(f"no free TCP port between {_FIRST} and {_LAST} on {host}")


def next_free(host: str, port: int) -> int:
    """The first port after ``port`` that nothing listens on now. Raises ``Misconfigured`` when none is near."""
    for candidate in range(port + 1, min(port + _TRIES, 1 << 16)):
        if is_free(host, candidate):
            return candidate
    raise Misconfigured(f"no free TCP port between {port} and {port + _TRIES} on {host}")


def is_free(host: str, port: int) -> bool:
    return _refusal(host, port) is None


def _refusal(host: str, port: int, *, shared: bool = False) -> OSError | None:
    """Why nobody can listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((host, port))
            if not shared:  # else somebody's connection would come here
                sock.listen(1)
        except OSError as error:
            return error
    return None


def require_free(host: str, port: int, setting: str, *, shared: bool = False) -> None:
    """Raise ``Misconfigured`` naming the holder unless ``port`` is free; ``setting`` says how to choose another.

    ``shared``: or held by processes that share it.
    """
    error = _refusal(host, port, shared=shared)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise Misconfigured(f"cannot listen on {host}:{port} ({error.strerror}); choose another address or {setting}")
    raise Misconfigured(f"port {port} is in use by {holder(port)}; stop it or choose another port with {setting}")


def holder(port: int) -> str:
    """Who listens on ``port``: ``pid 42 (python -m http.server)``, or that it cannot be seen."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        connections = []
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            return _describe(connection.pid)
    return "a process that this user may not see"


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        command = " ".join(psutil.Process(pid).cmdline()) or psutil.Process(pid).name()
    except psutil.Error:
        return f"pid {pid}"
    return f"pid {pid} ({command if len(command) <= 100 else command[:97] + '...'})"
