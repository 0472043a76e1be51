"""Store processes, forked from one that has imported the store already: starting Python takes longer than most tests.

A store still has a process, memory and descriptors of its own, and can be stopped and killed like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvrelay.config_text import parse
from kvrelay.store.daemon import run_store
from kvrelay.types import StoreInfo

MAX_WISH_BYTES = 1 << 16
START_S = 30.0
"""Within it a store is ready, or dead."""


class Wish(msgspec.Struct, frozen=True):
    """The store to start."""

    toml: str
    name: str
    socket_path: str
    key: bytes
    routers: tuple[str, ...] = ()


class StoreChild:
    """A store's process. Its address is empty when it died before it was ready."""

    def __init__(self, pidfd: int, output: int) -> None:
        self._pidfd = pidfd
        try:
            pid, self.address = _two_lines(output)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            raise
        self.pid = int(pid)

    def signal(self, number: signal.Signals) -> None:
        """Raises ``ProcessLookupError`` when it is dead."""
        signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, within_s: float) -> None:
        """Until it has ended. Raises ``TimeoutError``."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(1000 * within_s):
            raise TimeoutError(f"process {self.pid} is still there")

    def __del__(self) -> None:
        os.close(self._pidfd)


def _two_lines(output: int) -> list[str]:
    """What a store says of itself, as far as it came before it died. Raises ``TimeoutError``; closes ``output``."""
    ready, text = select.poll(), ""
    ready.register(output, select.POLLIN)
    with open(output, "rb", buffering=0) as pipe:
        while text.count("\n") < 2:
            if not ready.poll(1000 * START_S):
                raise TimeoutError(f"a store that said {text!r} is not ready after {START_S:g} s")
            if not (part := pipe.read(1 << 10)):
                break
            text += part.decode()
    return (text + "\n\n").split("\n")[:2]


class Nursery:
    """Starts stores."""

    def __init__(self) -> None:
        self._link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(START_S)
        with far:
            command = [sys.executable, __file__, str(far.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL)

    def start(self, wish: Wish) -> StoreChild:
        output, theirs = os.pipe()
        socket.send_fds(self._link, [msgspec.json.encode(wish)], [theirs])
        os.close(theirs)
        _, (pidfd,), *_ = socket.recv_fds(self._link, 1, 1)
        return StoreChild(pidfd, output)

    def close(self) -> None:
        self._link.close()
        self._process.wait(10)


def main(link: socket.socket) -> None:
    """Fork a store for each wish, until nobody wishes any more."""
    while True:
        data, fds, *_ = socket.recv_fds(link, MAX_WISH_BYTES, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            link.close()
            live(msgspec.json.decode(data, type=Wish), fds[0])
            return
        _hand_over(link, pid, fds[0])


def _hand_over(link: socket.socket, pid: int, output: int) -> None:
    """Give the process itself away rather than its number, which may be another's once it is dead and buried."""
    os.close(output)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(link, [b"!"], [pidfd])
    os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def live(wish: Wish, output: int) -> None:
    """Be the store."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored

    def tell(info: StoreInfo) -> None:
        print(info.address, file=lines, flush=True)

    with open(output, "w") as lines:
        print(os.getpid(), file=lines, flush=True)
        path, config = Path(wish.socket_path), parse(wish.toml)
        asyncio.run(run_store(config, name=wish.name, socket_path=path, key=wish.key, routers=wish.routers, ready=tell))


@contextlib.contextmanager
def running() -> Iterator[Nursery]:
    nursery = Nursery()
    try:
        yield nursery
    finally:
        nursery.close()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
