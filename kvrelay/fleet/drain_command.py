"""The command that gives a drained worker work again, as it can be copied from what a router says of itself. It must
never ask its reader to fill anything in that the router knows."""

from __future__ import annotations

import shlex

from kvrelay.types import Value


class DrainCommand(Value, frozen=True, kw_only=True):
    """How ``kvrelay drain`` is run on the machine of one router."""

    program: tuple[str, ...] = ("kvrelay",)
    router: str = ""
    """Control port of the router, as HOST:PORT; empty: the one that the command tries itself."""
    key_file: str = "FILE"

    def undo(self, worker: str) -> str:
        """One line for a shell. One router is enough: the worker says to all others what it was told."""
        router = ("--router", self.router) if self.router else ()
        return shlex.join((*self.program, "drain", worker, "--undo", *router, "--key-file", self.key_file))
