"""Whatever can be broken, and is mended again. It must never leave anything broken behind."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from kvrelay.deploy.chaos.bursts import Bursts
from kvrelay.deploy.chaos.mending import Unmended, mend_each
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.deploy.mock.faults import Faults
from kvrelay.errors import Lost


class Victims(Protocol):
    """Some things, by name."""

    async def targets(self) -> list[Target]:
        """What there is. Raises ``Lost``."""

    async def begin(self) -> None:
        """Called once before the first fault. Raises ``Lost``."""

    async def hurt(self, name: str, deed: Deed) -> None:
        """Raises ``Lost`` when it is not there."""

    async def mend(self, name: str) -> None:
        """Undo that, also what was done in part. Raises ``Lost``; ``end`` tries again then."""

    async def end(self) -> list[Unmended]:
        """Everything is mended that can be; the rest."""


class Together:
    """Victims of several kinds; of one name, what all of them can do to it."""

    def __init__(self, kinds: Sequence[Victims]) -> None:
        self._kinds = kinds
        self._able: dict[tuple[str, Deed], Victims] = {}
        self._hurt: dict[str, Victims] = {}

    def __repr__(self) -> str:
        return f"<Together {list(self._kinds)}>"

    async def targets(self) -> list[Target]:
        kinds: dict[str, str] = {}
        for victims in self._kinds:
            for target in await victims.targets():
                kinds.setdefault(target.name, target.kind)
                self._able |= {(target.name, deed): victims for deed in target.deeds}
        return [
            Target(name=name, kind=kind, deeds=tuple(deed for able, deed in self._able if able == name))
            for name, kind in kinds.items()
        ]

    async def begin(self) -> None:
        for victims in self._kinds:
            await victims.begin()

    async def hurt(self, name: str, deed: Deed) -> None:
        self._hurt[name] = self._able[name, deed]
        await self._hurt[name].hurt(name, deed)

    async def mend(self, name: str) -> None:
        if name in self._hurt:
            await self._hurt[name].mend(name)

    async def end(self) -> list[Unmended]:
        left = await asyncio.gather(*(victims.end() for victims in self._kinds))
        return [each for of_kind in left for each in of_kind]


SUFFERED = {
    Deed.KILL: Faults(dead=True),
    Deed.STOP: Faults(hang=True),
    Deed.HALF_OPEN: Faults(mute=True),
    Deed.PARTITION: Faults(mute=True),
    Deed.CLOCK: Faults(clock_s=-7 * 3600.0),
    Deed.FULL_ARENA: Faults(full=True),
}
"""What mock workers and stores make of deeds."""
OF_STORES = (Deed.KILL, Deed.PARTITION, Deed.FULL_ARENA)
OF_WORKERS = (Deed.KILL, Deed.STOP, Deed.HALF_OPEN, Deed.PARTITION, Deed.LOSS, Deed.CLOCK)


class MockVictims:
    """Mock workers and stores, by the route of ``kvrelay fault``."""

    def __init__(self, http: aiohttp.ClientSession, url: str, engine_key: str) -> None:
        self._http = http
        self._url = f"{url}/workers"
        self._headers = {"authorization": f"Bearer {engine_key}"}
        self.step_s = 0.0
        """While things are broken no step of a decode worker is shorter: many streams then are not more tokens a second
        than few, and their prompts are computed as fast as before."""
        self._targets: dict[str, Target] = {}
        self._hurt: dict[str, Deed] = {}
        self._bursts: dict[str, Bursts] = {}
        self._given: set[str] = set()
        """Who may not be as it was found."""

    def __repr__(self) -> str:
        return f"<MockVictims at {self._url}, {self._hurt}>"

    async def targets(self) -> list[Target]:
        for each in await self._ask("GET", ""):
            name, kind = each["name"], each["role"]
            deeds = OF_STORES if kind == "store" else OF_WORKERS
            self._targets[name] = Target(name=name, kind=kind, deeds=deeds)
        return list(self._targets.values())

    async def begin(self) -> None:
        for name in self._targets:
            await self.give(name, self._usual(name))

    async def hurt(self, name: str, deed: Deed) -> None:
        self._hurt[name] = deed
        if deed is Deed.LOSS:
            self._bursts[name] = Bursts(lambda lost: self._suffer(name, Faults(mute=lost)))
        else:
            await self._suffer(name, SUFFERED[deed])

    async def mend(self, name: str) -> None:
        await self._heal(name, self._usual(name))

    async def end(self) -> list[Unmended]:
        port = urllib.parse.urlsplit(self._url).port
        by_hand = f"none --port {port} --key-file KEY"
        return await mend_each(
            self._given, lambda name: self._heal(name, Faults()), lambda name: f"kvrelay fault {name} {by_hand}"
        )

    async def _heal(self, name: str, then: Faults) -> None:
        if name in self._bursts:
            await self._bursts[name].end()
            self._bursts.pop(name, None)  # unless another mend of it was first
        if self._hurt.get(name) is Deed.HALF_OPEN:
            await self.give(name, Faults(dead=True))
        await self.give(name, then)
        self._hurt.pop(name, None)

    def _usual(self, name: str) -> Faults:
        target = self._targets.get(name)
        return Faults(step_s=self.step_s if target is not None and target.kind == "decode" else 0.0)

    async def _suffer(self, name: str, faults: Faults) -> None:
        await self.give(name, msgspec.structs.replace(faults, step_s=self._usual(name).step_s))

    async def give(self, name: str, faults: Faults) -> None:
        """These faults and no others. Raises ``Lost``."""
        self._given.add(name)
        await self._ask("PUT", f"/{name}/faults", msgspec.json.encode(faults))
        if faults == Faults():
            self._given.discard(name)

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        try:
            async with self._http.request(method, self._url + path, data=body, headers=self._headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Lost(f"no mock workers answer at {self._url}: {error}") from error
        if response.status != 200:
            raise Lost(f"the mock workers answer {response.status}: {answer.decode(errors='replace')[:200]}")
        return msgspec.json.decode(answer)
