"""This machine's wall clock, which jumps and comes back. It must never stay wrong for longer than the run."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvrelay.deploy.chaos.mending import Unmended, mend_each
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost

JUMP_S = -7 * 3600.0
"""Back, which is worse than forward: whoever waits for a time of day waits for hours."""


def _set(wall_s: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, wall_s)


class ClockVictims:
    """One machine's, as all its processes see it. Root may set it."""

    def __init__(self, wall: Callable[[], float] = time.time, set_wall: Callable[[float], None] = _set) -> None:
        self._wall = wall
        self._set_wall = set_wall
        self._true: tuple[float, float] | None = None
        """While it is wrong: what it said before, and the steady clock then."""

    def __repr__(self) -> str:
        return f"<ClockVictims, {'right' if self._true is None else 'wrong'}>"

    async def targets(self) -> list[Target]:
        return [Target(name="clock", kind="machine", deeds=(Deed.CLOCK,))]

    async def begin(self) -> None:
        """Raises ``Lost`` when this user may not set the clock."""
        self._jump(self._wall())

    async def hurt(self, name: str, deed: Deed) -> None:
        if self._true is not None:
            raise Lost("the clock is wrong already")
        wall_s = self._wall()
        self._jump(wall_s + JUMP_S)
        self._true = wall_s, time.monotonic()

    async def mend(self, name: str) -> None:
        if self._true is not None:
            wall_s, then_s = self._true
            self._jump(wall_s + time.monotonic() - then_s)
            self._true = None

    async def end(self) -> list[Unmended]:
        by_hand = f"date --set=@$(($(date +%s) + {-JUMP_S:.0f})), as root"
        return await mend_each(["clock"] if self._true is not None else [], self.mend, lambda _: by_hand)

    def _jump(self, wall_s: float) -> None:
        try:
            self._set_wall(wall_s)
        except OSError as error:
            raise Lost(f"the clock cannot be set ({error.strerror}); run this as root, or without --clock") from error
