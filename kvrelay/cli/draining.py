"""Asks every router to drain a worker, and what is left there. It must never take one router's word for all."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import Lost, Refused
from kvrelay.protocol.message import Message
from kvrelay.protocol.operator import AskRemaining, DrainWorker, HandOver, Remaining

REDIAL_S = 10.0
"""Longest wait for a router that goes away meanwhile: one that is started again has to be told as well."""
_RETRY_S = 0.2


class Said:
    """What a worker still does for all routers together."""

    def __init__(self, worker: str, answers: Iterable[Remaining]) -> None:
        self.worker = worker
        self._answers = list(answers)

    def __repr__(self) -> str:
        return f"<Said {self}>"

    def __str__(self) -> str:
        counts = {
            "answers": sum(each.answers for each in self._answers),
            "prompts": sum(each.prompts for each in self._answers),
            "transfers": sum(each.transfers for each in self._answers),
        }
        left = ", ".join(f"{count} {what if count > 1 else what[:-1]}" for what, count in counts.items() if count)
        return f"{self.worker} has {left or 'nothing'} left"

    @property
    def is_empty(self) -> bool:
        return all(each.is_empty for each in self._answers)

    @property
    def unasked(self) -> str:
        """What is to be done where the cluster has more routers than were asked; empty when all were."""
        asked, there = len(self._answers), max((each.routers for each in self._answers), default=0)
        if asked >= there:
            return ""
        return (
            f"{asked} of {there} routers (router.replicas) {'was' if asked == 1 else 'were'} asked, and the others may "
            f"still send work to {self.worker}: name the control port of each with --router; kvrelay up prints them all"
        )

    @property
    def is_draining(self) -> bool:
        return all(each.draining or each.gone for each in self._answers)


class Routers:
    """Links to all ``addresses``; use as an async context manager, and after ``drain`` only for that worker."""

    def __init__(self, addresses: Iterable[str], key: bytes) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))
        self._key = key
        self._links: dict[str, Channel] = {}
        self._order: DrainWorker | None = None

    def __repr__(self) -> str:
        return f"<Routers {len(self._links)} of {len(self._addresses)}>"

    async def __aenter__(self) -> Routers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._links.values():
            link.close()

    async def drain(self, worker: str, *, undo: bool = False, force: bool = False) -> Said:
        """Give ``worker`` no new work, or work again. Raises ``Lost``, ``Refused``, ``Malformed``.

        Of several routers one may refuse what others do: it has seen other workers fail. Then it is undone there, and
        at those whose answer was lost and who may have obeyed, unless the worker drained before.
        """
        order = DrainWorker(worker=worker, undo=undo, force=force)
        drained_before = not undo and await self._drains_somewhere(worker)
        answers = await self._ask_each(order)
        try:
            said = _said(worker, answers.values())
        except Refused as refusal:
            others = [address for address, answer in answers.items() if not isinstance(answer, Refused)]
            if not undo and not drained_before:
                await self._take_back(worker, others, refusal)
            raise
        self._order = order
        return said

    async def _drains_somewhere(self, worker: str) -> bool:
        answers = await self._ask_each(AskRemaining(worker=worker))
        return any(isinstance(answer, Remaining) and answer.draining for answer in answers.values())

    async def _take_back(self, worker: str, addresses: Sequence[str], refusal: Refused) -> None:
        """Raises ``Refused`` when somebody could not be told."""
        answers = await self._ask_each(DrainWorker(worker=worker, undo=True), addresses)
        failed = {address: answer for address, answer in answers.items() if not isinstance(answer, Remaining)}
        if failed:
            told = f"{refusal}; it may drain still at {', '.join(f'{at} ({why})' for at, why in failed.items())}"
            routers = "".join(f" --router {address}" for address in failed)
            raise Refused(f"{told}: run kvrelay drain {worker} --undo{routers}, with the same --key-file") from refusal

    async def remaining(self, worker: str) -> Said:
        """What ``worker`` still does. Raises ``Lost``, ``Refused``, ``Malformed``."""
        return await self._ask_all(AskRemaining(worker=worker))

    async def hand_over(self, worker: str) -> Said:
        """Let streams go on elsewhere; what ``worker`` still does then. Raises ``Lost``, ``Refused``, ``Malformed``."""
        return await self._ask_all(HandOver(worker=worker))

    async def _ask_all(self, message: AskRemaining | HandOver) -> Said:
        return _said(message.worker, (await self._ask_each(message)).values())

    async def _ask_each(
        self, message: Message, addresses: Sequence[str] | None = None
    ) -> dict[str, Remaining | BaseException]:
        """Answers by address, of all routers or of these."""
        addresses = self._addresses if addresses is None else addresses
        asked = (self._ask(address, message) for address in addresses)
        answers = await asyncio.gather(*asked, return_exceptions=True)  # none is given up in the middle
        return dict(zip(addresses, answers, strict=True))

    async def _ask(self, address: str, message: Message) -> Remaining:
        if self._order is None:
            return await self._asked(address, message)
        loop = asyncio.get_running_loop()
        until = loop.time() + REDIAL_S
        while True:
            try:
                return await self._asked(address, message)
            except (Lost, Refused):
                if loop.time() >= until:
                    raise
            # A router that was started again knows nothing of the drain, nor at first of the worker.
            message = self._order
            await asyncio.sleep(_RETRY_S)

    async def _asked(self, address: str, message: Message) -> Remaining:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = await self._connected(address)
        try:
            async with channel.in_time(address):
                await link.send(message)
                return await channel.expect(link, Remaining)
        except BaseException:  # a late answer must not be taken for that of the next question
            self._links.pop(address).close()
            raise

    async def _connected(self, address: str) -> Channel:
        """Raises ``Lost``, ``Refused``, ``Malformed``, each with the address: it may be another cluster's."""
        try:
            return await channel.connect(address, self._key, sender="kvrelay drain", purpose="operator")
        except Refused as error:
            raise Refused(f"{address}: {error}") from error
        except Lost as error:
            raise Lost(f"{error}; kvrelay up prints the --router of each of its routers") from error


def _said(worker: str, answers: Collection[Remaining | BaseException]) -> Said:
    """What they say together. Raises what one of them raised."""
    refusals = [answer for answer in answers if isinstance(answer, BaseException)]
    if refusals:
        raise next((each for each in refusals if isinstance(each, Refused)), refusals[0])
    return Said(worker, [answer for answer in answers if isinstance(answer, Remaining)])
