"""TCP ports of this machine: free ones, and who holds a taken one."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable
from types import TracebackType

import psutil

from kvrelay.errors import Misconfigured

_FIRST, _LAST = 20_000, 32_000
"""Below Linux's ephemeral range (32768 and up): no outgoing connection takes the port before its server binds it."""
_TRIES = 200
CONTROL_PORT = "--control-port (0: any)"
"""How to choose another control port."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now, and that nobody has claimed. Whoever does not bind it at once claims it.

    Raises ``Misconfigured`` when none is found.
    """
    with PortClaims() as claims:
        return claims.free(host)


class PortClaims:
    """Ports that are chosen here for somebody who binds them later: nobody else chooses them until ``release``, in any
    process of this machine. Use as a context manager, or call ``release``.

    A claim is the name of a socket, of the kind that is no file: the network namespace that has the port has it, and
    the kernel takes it back from who dies. To hold the port itself would keep its server from binding it.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def __repr__(self) -> str:
        return f"<PortClaims {sorted(self._held)}>"

    def __enter__(self) -> PortClaims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def free(self, host: str) -> int:
        """A port that nothing listens on now. Raises ``Misconfigured`` when none is found."""
        port = self._first(host, (random.randint(_FIRST, _LAST) for _attempt in range(_TRIES)))
        if port is None:
            raise Misconfigured(f"no free TCP port between {_FIRST} and {_LAST} on {host}")
        return port

    def after(self, host: str, port: int) -> int:
        """The first port after ``port`` that nothing listens on now. Raises ``Misconfigured`` when none is near."""
        found = self._first(host, range(port + 1, min(port + _TRIES, 1 << 16)))
        if found is None:
            raise Misconfigured(f"no free TCP port between {port} and {port + _TRIES} on {host}")
        return found

    def keep(self, port: int) -> None:
        """``port``, which somebody was told to use, is not to be chosen for anybody else; 0 is none."""
        if port:
            self._claim(port)

    def _first(self, host: str, ports: Iterable[int]) -> int | None:
        return next((port for port in ports if self._claim(port) and self._keep_if_free(host, port)), None)

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0kvrelay-port-{port}")
        except OSError:  # somebody's, maybe ours
            claim.close()
            return False
        self._held[port] = claim
        return True

    def _keep_if_free(self, host: str, port: int) -> bool:
        if is_free(host, port):
            return True
        self._held.pop(port).close()
        return False

    def release(self) -> None:
        """Others may choose them."""
        while self._held:
            self._held.popitem()[1].close()


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
    """The process that listens on ``port``: ``pid 42 (python -m http.server)``, or that it cannot be seen."""
    for pid in _listeners(port):
        return _describe(pid)
    return "a process that this user may not see"


def routers_at(port: int) -> frozenset[int]:
    """Processes that listen on ``port`` and are kvrelay routers; replicas share one."""
    return frozenset(pid for pid in _listeners(port) if pid is not None and "kvrelay router" in _command(pid))


def _listeners(port: int) -> list[int | None]:
    """Processes that listen on ``port``; None is one of another user."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    return [
        connection.pid
        for connection in connections
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    ]


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    command = _command(pid)
    if not command:
        return f"pid {pid}"
    return f"pid {pid} ({command if len(command) <= 100 else command[:97] + '...'})"


def _command(pid: int) -> str:
    """Its command line, its name where it has none; empty when it is gone or hidden."""
    try:
        return " ".join(psutil.Process(pid).cmdline()) or psutil.Process(pid).name()
    except psutil.Error:
        return ""
