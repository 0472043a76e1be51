"""Victims of several kinds, of which some are the same members."""

from __future__ import annotations

from kvrelay.deploy.chaos.mending import Unmended
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.deploy.chaos.victims import Together


class Kind:
    """Can do one thing to one member, and keeps what it was asked for."""

    def __init__(self, name: str, deed: Deed) -> None:
        self._target = Target(name=name, kind="decode", deeds=(deed,))
        self.asked: list[str] = []

    async def targets(self) -> list[Target]:
        return [self._target]

    async def begin(self) -> None:
        self.asked.append("begin")

    async def hurt(self, name: str, deed: Deed) -> None:
        self.asked.append(f"{deed} {name}")

    async def mend(self, name: str) -> None:
        self.asked.append(f"mend {name}")

    async def end(self) -> list[Unmended]:
        self.asked.append("end")
        return []


async def test_who_can_suffer_in_two_ways_is_one_target_and_is_mended_by_whom_it_was_hurt() -> None:
    stop, cut, other = Kind("d0", Deed.STOP), Kind("d0", Deed.PARTITION), Kind("d1", Deed.STOP)
    victims = Together([stop, cut, other])
    assert await victims.targets() == [
        Target(name="d0", kind="decode", deeds=(Deed.STOP, Deed.PARTITION)),
        Target(name="d1", kind="decode", deeds=(Deed.STOP,)),
    ]
    await victims.begin()
    await victims.hurt("d0", Deed.PARTITION)
    await victims.mend("d0")
    await victims.end()
    assert stop.asked == other.asked == ["begin", "end"]
    assert cut.asked == ["begin", "partition d0", "mend d0", "end"]
