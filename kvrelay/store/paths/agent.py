"""NIXL, as far as a store needs it: one agent a process, arenas registered with it, writes and their states.

It must never run NIXL's progress thread, which spins: whoever waits for a write makes progress, and asks the other
side to (``Nudge``). It must never keep memory registered that is given back to the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.errors import Lost
from kvrelay.store.arena import Arena

PUMP_S = 0.001
PUMPED_S = 0.02
"""How long a nudge lasts; the peer nudges again while its write is not done."""

Runs = npt.NDArray[np.uint64]
"""``[pieces, 3]``: address, length in bytes, 0."""


class Agent:
    """NIXL's agent of this process. All calls come from the thread that made it."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._registered: dict[int, tuple[Arena, Any]] = {}
        self._withdrawn: set[int] = set()
        self._pumps_until = 0.0

    @classmethod
    def create(cls, name: str, *, only_loopback: bool) -> Agent:
        """Start NIXL. Takes most of a second. Raises ``Lost`` when it is not installed or cannot start here."""
        if only_loopback:
            # UCX listens at every network address, and authenticates nobody.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        cores = os.sched_getaffinity(0)
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            return cls(nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])))
        except ImportError as error:
            raise Lost(f"NIXL is not installed ({error}); pip install 'kvrelay[nixl]'") from error
        except Exception as error:  # border: whatever NIXL raises means that it cannot be used
            raise Lost(f"NIXL does not start: {error}") from error
        finally:
            os.sched_setaffinity(0, cores)  # it may have changed that

    def __repr__(self) -> str:
        return f"<Agent {self._nixl.name}, {len(self._registered)} arenas registered>"

    def register(self, arena: Arena) -> None:
        """Make ``arena`` readable and writable for NIXL. Raises ``Lost`` when that cannot be (any more).

        A network card pins all of it in memory, and never sees that a page was given back: an arena that gives
        memory back is taken out first, and stays out.
        """
        if id(arena) in self._withdrawn:
            raise Lost("this arena gives memory back to the machine, which a network card would not notice")
        if id(arena) not in self._registered:
            region = [(arena.address, arena.slots * arena.stride, 0, "")]
            self._registered[id(arena)] = (arena, _mapped(lambda: self._nixl.register_memory(region, "DRAM")))
            arena.before_punch = lambda: self.withdraw(arena)

    def withdraw(self, arena: Arena) -> None:
        """Take ``arena`` out for good: one-sided writes into it fail from now on, or touch what is free."""
        registered = self._registered.pop(id(arena), None)
        if registered is not None:
            self._withdrawn.add(id(arena))
            with contextlib.suppress(Lost):  # who takes memory back for a page must not fail for it
                _mapped(lambda: self._nixl.deregister_memory(registered[1]))

    @property
    def metadata(self) -> bytes:
        """What a peer's agent needs to write here; it grows with every arena."""
        data: bytes = _mapped(self._nixl.get_agent_metadata)
        return data

    def meet(self, metadata: bytes) -> str:
        """Get to know a peer's agent and arenas; its name. Raises ``Lost``."""
        name: bytes | str = _mapped(lambda: self._nixl.add_remote_agent(metadata))
        return name.decode(errors="replace") if isinstance(name, bytes) else name

    def forget(self, peer: str) -> None:
        """End the connection to a peer's agent."""
        with contextlib.suppress(Lost):  # it is gone: whoever gives a path up must come to the next one
            _mapped(lambda: self._nixl.remove_remote_agent(peer))

    def write(self, peer: str, here: Runs, there: Runs) -> Write:
        """Begin to write pieces of memory from ``here`` to ``there``. Raises ``Lost``."""
        return Write(self._nixl, _mapped(lambda: self._begin(peer, here, there)))

    def _begin(self, peer: str, here: Runs, there: Runs) -> Any:
        nixl = self._nixl
        handle = nixl.initialize_xfer(
            "WRITE", nixl.get_xfer_descs(here, "DRAM"), nixl.get_xfer_descs(there, "DRAM"), peer
        )
        if nixl.transfer(handle) == "ERR":
            nixl.release_xfer_handle(handle)
            raise Lost(f"NIXL cannot write to {peer}")
        return handle

    def pump(self) -> None:
        """A peer's write needs us: make progress now, and for a moment."""
        loop = asyncio.get_running_loop()
        if self._pumps_until <= loop.time():
            loop.call_later(PUMP_S, self._pump, loop)
        self._pumps_until = loop.time() + PUMPED_S
        self._progress()

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        self._progress()
        if loop.time() < self._pumps_until:
            loop.call_later(PUMP_S, self._pump, loop)

    def _progress(self) -> None:
        with contextlib.suppress(Lost):  # the peer's write fails then, and it says so
            _mapped(self._nixl.get_new_notifs)

    def close(self) -> None:
        """Take every arena out; safe to call twice."""
        for arena, _ in list(self._registered.values()):
            self.withdraw(arena)


class Write:
    """One write on its way."""

    def __init__(self, nixl: Any, handle: Any) -> None:
        self._nixl = nixl
        self._handle = handle

    def __repr__(self) -> str:
        return f"<Write {self._state()}>"

    @property
    def is_done(self) -> bool:
        """Whether all of it is there. Raises ``Lost`` when it failed."""
        state = self._state()
        if state == "ERR":
            raise Lost("a one-sided write failed")
        return state == "DONE"

    def _state(self) -> str:
        try:
            state: str = _mapped(lambda: self._nixl.check_xfer_state(self._handle))
        except Lost:
            return "ERR"  # the peer's end shows as any of NIXL's errors
        return state

    def release(self) -> bool:
        """Let go of it, done or not; False while it cannot be stopped."""
        try:
            _mapped(lambda: self._nixl.release_xfer_handle(self._handle))
        except Lost:
            return False
        return True


def _mapped(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Lost:
        raise
    except Exception as error:  # border: NIXL has errors of its own, and all of them mean the same here
        raise Lost(f"NIXL failed: {error}") from error
