"""A request of several prompts, whose prefill workers are watched one by one."""

from __future__ import annotations

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import AbandonPrefill, Ask, Command
from kvrelay.protocol.feed import Heartbeat, TransferEvent
from kvrelay.types import RequestFacts, Role, Stage
from tests.fleet.known import member
from tests.fleet.values import begun, store


def test_one_that_hangs_is_noticed_while_another_one_tells_of_its_own_prompt() -> None:
    brain = Brain(dead_after_s=2.0, transfer_wait_s=60.0, local_prefill=False)
    brain.members.register_store(store(), 0.0)
    workers = [member("p0", Role.PREFILL), member("p1", Role.PREFILL), member("d0", Role.DECODE)]
    for info in workers:
        brain.register_worker(info, 0.0)
    facts = RequestFacts(request_id="r0", model="tiny", prompt_tokens=(200, 200), max_tokens=16, page_names=())
    plan = begun(brain, Ask(facts=facts, received_s=0.0))
    assert {order.worker for order in plan.prefills} == {"p0", "p1"}
    for _ in plan.prefills:
        brain.prefill_sent("r0", 0.0)
    commands: list[Command] = []
    for tenth in range(1, 50):
        for info in workers:
            beat = Heartbeat(name=info.name, incarnation="i1", healthy=True, progress=0 if info.name == "p1" else tenth)
            brain.members.heartbeat(info, beat, tenth / 10)
        (talks,) = [order for order in plan.prefills if order.worker == "p0"]
        brain.transfer_event(TransferEvent(store="s1", transfer=talks.transfer, stage=Stage.STARTED), tenth / 10)
        commands += brain.tick(tenth / 10)
    (hangs,) = [order for order in plan.prefills if order.worker == "p1"]
    assert AbandonPrefill(request_id="r0", index=hangs.index) in commands
    assert AbandonPrefill(request_id="r0", index=1 - hangs.index) not in commands
