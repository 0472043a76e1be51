"""A fleet whose workers say that they live, and how far they are: for tests of who counts as lost."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.experience import Learned, kind_of
from kvrelay.fleet.flight import AbandonDecode, Rest
from kvrelay.protocol.feed import Heartbeat, TransferEvent
from kvrelay.types import Role, Stage
from tests.fleet.known import PERF, ask, member
from tests.fleet.values import begun, store

PROMPT, WRITTEN = (7, 200), (9, 400)


def rest(**more: Any) -> Rest:
    """What is left of ``r0``."""
    return Rest(ask=ask("r0", PROMPT, WRITTEN), tokens=40, **more)


class Beats:
    """A fleet with short leases whose members say that they live."""

    def __init__(self, *decodes: str, known: bool = False) -> None:
        """``known``: what they take for a token."""
        self.brain = Brain(dead_after_s=2.0, transfer_wait_s=60.0, local_prefill=False)
        self.now = 0.1
        if known:
            self.brain.experience.recall(Learned(kinds={kind_of(member("any", Role.DECODE).engine): PERF}, handoffs=0))
        self.brain.members.register_store(store(), 0.0)
        self.workers = [member("p0", Role.PREFILL), *(member(name, Role.DECODE) for name in decodes)]
        for info in self.workers:
            self.brain.register_worker(info, 0.0)

    def silent(self, until_s: float, *, mute: Collection[str] = (), p_steps: bool = True) -> AbandonDecode | None:
        """D writes nothing from 0.1 s on; the first command to leave it. Workers beat unless they are ``mute``, and
        only P makes progress."""
        for tenth in range(1, round(until_s * 10)):
            now = tenth / 10
            for info in self.workers:
                if info.name not in mute:
                    steps = tenth if info.name == "p0" and p_steps else 0
                    self.brain.members.heartbeat(
                        info,
                        Heartbeat(
                            name=info.name, incarnation=info.incarnation, healthy=True, counts={}, progress=steps
                        ),
                        now,
                    )
            for command in self.brain.silences.unanswered("r0", 0.1, now):
                assert isinstance(command, AbandonDecode)
                return command
        return None

    @property
    def decode(self) -> str:
        """The D of ``r0``."""
        return self.brain.decode_order("r0", self.now).worker

    def steps(self, now: float, *, hangs: str = "") -> None:
        """All beat; all but one make progress."""
        self.now = now
        for info in self.workers:
            member = self.brain.fleet.workers.get(info.name)
            assert member is not None, "it is registered"
            done = member.progress if info.name == hangs else round(now * 1000)
            beat = Heartbeat(name=info.name, incarnation=info.incarnation, healthy=True, counts={}, progress=done)
            self.brain.members.heartbeat(info, beat, now)

    def asked(self, **more: Any) -> str:
        """``r0`` is with P and with D; its transfer. ``more`` is said of it."""
        begun(self.brain, replace(ask("r0", (7, 1000)), **more))
        transfer = "r0/0/0"
        self.brain.prefill_sent("r0", 0.0)
        self.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.LAST_CHUNK), 0.1)
        self.brain.decode_order("r0", 0.1)
        return transfer
