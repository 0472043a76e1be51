"""The brain with a clock made of numbers: what it chooses, reserves and commands."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvrelay.errors import Overloaded, Unasked
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.experience import Learned
from kvrelay.fleet.flight import AbandonDecode, AbandonPrefill, Ask, DispatchDecode, Plan, SendPrefill
from kvrelay.fleet.workers import FORGET_S
from kvrelay.identity import name_pages, root_name, root_of
from kvrelay.policy.cost import Item
from kvrelay.policy.moves import link
from kvrelay.policy.route import Path
from kvrelay.protocol.feed import Heartbeat, TransferEvent
from kvrelay.types import PageName, RequestFacts, Role, Stage
from tests.fleet.known import known_brain
from tests.fleet.values import fingerprint, store, worker


def ask(
    name: str = "r1", prompts: tuple[int, ...] = (100,), *, names: tuple[PageName, ...] = (), **more: object
) -> Ask:
    pages = ({root_of(fingerprint()): names},) * len(prompts) if names else ()
    facts = RequestFacts(request_id=name, model="tiny", prompt_tokens=prompts, max_tokens=16, page_names=pages)
    return Ask(facts=facts, received_s=0.0, **more)  # type: ignore[arg-type]


def fleet(prefill: int = 1, decode: int = 1, both: int = 0, *, dead_after_s: float = 2.0) -> Brain:
    brain = Brain(dead_after_s=dead_after_s, transfer_wait_s=10.0)
    brain.members.register_store(store(), 0.0)
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both)):
        for number in range(count):
            brain.register_worker(worker(f"{role.value}-{number}", role), 0.0)
    return brain


def says(transfer: str, stage: Stage) -> TransferEvent:
    return TransferEvent(store="s1", transfer=transfer, stage=stage)


def begin(brain: Brain, asked: Ask, now: float = 0.0) -> Plan:
    plan = brain.begin(asked, now)
    assert isinstance(plan, Plan)
    for _ in plan.prefills:
        brain.prefill_sent(asked.facts.request_id, now)
    return plan


def test_eight_requests_at_once_are_spread_over_eight_idle_workers() -> None:
    brain = fleet(prefill=8, decode=8)
    plans = [begin(brain, ask(f"r{number}")) for number in range(8)]
    assert max(Counter(plan.prefills[0].worker for plan in plans).values()) == 1
    decoders = Counter(brain.decode_order(f"r{number}", 0.0).worker for number in range(8))
    assert max(decoders.values()) == 1
    brain.check_invariants()


def test_what_is_reserved_at_begin_is_given_back_at_finish() -> None:
    brain = fleet()
    begin(brain, ask(prompts=(100, 50)))
    assert (brain.loads.queued_tokens["prefill-0"], brain.loads.kv_tokens["decode-0"]) == (150, 166)
    brain.check_invariants()
    brain.finish("r1", status=200, output_tokens=3, now=1.0)
    assert repr(brain.loads) == "<Loads 0 prefill legs, 0 sequences>"
    brain.check_invariants()


def test_a_broken_sum_is_noticed() -> None:
    brain = fleet()
    begin(brain, ask())
    brain.loads.queued_tokens["prefill-0"] -= 1
    with pytest.raises(AssertionError, match="reserved"):
        brain.check_invariants()


def test_a_prompt_goes_where_its_prefix_went_until_that_queue_is_longer() -> None:
    brain = fleet(prefill=2)
    names = tuple(name_pages(root_name(fingerprint()), range(100), 4))
    chosen = []
    for number in range(3):
        chosen.append(begin(brain, ask(f"r{number}", names=names)).prefills[0].worker)
        brain.prefill_finished(f"r{number}", 0, 0, 0.0)
    assert len(set(chosen)) == 1
    other = begin(brain, ask("other", (1000,))).prefills[0].worker
    assert other != chosen[0]
    begin(brain, ask("big", (5000,)))
    assert begin(brain, ask("last", names=names)).prefills[0].worker in [*chosen, other]
    brain.check_invariants()


def test_a_restarted_worker_is_not_thought_to_hold_anything() -> None:
    brain = fleet(prefill=2)
    names = tuple(name_pages(root_name(fingerprint()), range(100), 4))
    first = begin(brain, ask("r0", names=names)).prefills[0].worker
    brain.finish("r0", status=200, output_tokens=1, now=0.0)
    brain.register_worker(worker(first, Role.PREFILL, incarnation="i2"), 1.0)
    assert brain.index.prefix(first, "i2", names) == 0
    assert brain.index.prefix(first, "i1", names) == 0


@pytest.mark.parametrize("stage", [Stage.LAST_CHUNK, Stage.FAILED])
def test_d_is_dispatched_once_and_when_nothing_is_gained_by_waiting(stage: Stage) -> None:
    brain = fleet()
    transfer = begin(brain, ask()).prefills[0].transfer
    assert brain.transfer_event(says(transfer, Stage.STARTED), 0.1) == []
    assert brain.transfer_event(says(transfer, stage), 0.2) == [DispatchDecode(request_id="r1")]
    assert brain.transfer_event(says(transfer, stage), 0.3) == []
    assert brain.prefill_finished("r1", 0, 5, 0.4) == []
    assert brain.cached_tokens("r1") == 5


def test_d_waits_for_the_last_chunk_of_every_prompt() -> None:
    brain = fleet()
    first, second = begin(brain, ask(prompts=(10, 20))).prefills
    assert brain.transfer_event(says(first.transfer, Stage.LAST_CHUNK), 0.1) == []
    assert brain.prefill_finished("r1", second.index, 0, 0.2) == [DispatchDecode(request_id="r1")]
    assert set(brain.decode_order("r1", 0.3).transfers) == {first.transfer, second.transfer}


def test_a_failed_prefill_goes_to_each_other_p_once_and_then_to_d() -> None:
    brain = fleet(prefill=2)
    plan = begin(brain, ask())
    (again,) = brain.prefill_failed("r1", 0, 0.1)
    assert isinstance(again, SendPrefill)
    assert again.order.worker != plan.prefills[0].worker
    assert again.order.transfer != plan.prefills[0].transfer
    assert brain.prefill_failed("r1", 0, 0.2) == [DispatchDecode(request_id="r1")]
    assert brain.decode_order("r1", 0.3).transfers == ()
    assert brain.cached_tokens("r1") is None
    assert brain.loads.prefill_legs.total() == 0


def test_a_prefill_that_fails_after_d_was_asked_is_not_sent_again() -> None:
    brain = fleet(prefill=2)
    transfer = begin(brain, ask()).prefills[0].transfer
    brain.transfer_event(says(transfer, Stage.LAST_CHUNK), 0.1)
    assert brain.prefill_failed("r1", 0, 0.2) == []
    # D may hold some of its pages, so D's own count would be too high.
    assert brain.cached_tokens("r1") == 0
    assert brain.decode_order("r1", 0.3).transfers == (transfer,)


def test_silence_of_p_has_an_end() -> None:
    brain = fleet()
    transfer = begin(brain, ask()).prefills[0].transfer
    brain.transfer_event(says(transfer, Stage.STARTED), 9.0)
    for member in (worker("prefill-0", Role.PREFILL), worker("decode-0", Role.DECODE)):
        brain.members.heartbeat(member, Heartbeat(name=member.name, incarnation="i1", healthy=True), 18.9)
    assert brain.tick(18.9) == []
    assert brain.tick(19.1) == [DispatchDecode(request_id="r1")]
    assert brain.tick(19.2) == []


def test_a_silent_worker_loses_its_prefills_but_keeps_its_streams() -> None:
    brain = fleet()
    begin(brain, ask())
    assert brain.tick(2.0) == []
    assert brain.tick(2.1) == [AbandonPrefill(request_id="r1", index=0)]
    assert brain.tick(2.2) == []


@pytest.mark.parametrize("how", ["silent", "unhealthy"])
@pytest.mark.parametrize("flows", [False, True], ids=["nothing comes", "its stream flows"])
def test_a_d_without_a_sign_of_health_for_several_leases_is_given_up_by_those_that_hear_nothing(
    how: str, flows: bool
) -> None:
    brain = fleet()
    begin(brain, ask())
    given_up: set[float] = set()
    for tenths in range(1, 80):
        now = tenths / 10
        for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)):
            healthy = role is Role.PREFILL
            if healthy or how == "unhealthy":
                beat = Heartbeat(name=name, incarnation="i1", healthy=healthy)
                brain.members.heartbeat(worker(name, role), beat, now)
        assert AbandonDecode(request_id="r1") not in brain.tick(now)
        if AbandonDecode(request_id="r1") in brain.silences.unanswered("r1", now - 0.2 if flows else 0.0, now):
            given_up.add(now)
    # At every tick from then on: a request that chose this D earlier may be sent there only now.
    assert given_up == (set() if flows else {tenths / 10 for tenths in range(61, 80)})


def test_what_was_sent_to_workers_whose_names_are_forgotten_is_forgotten_too() -> None:
    brain = fleet(prefill=0)
    names = tuple(name_pages(root_name(fingerprint()), range(100), 4))
    for number in range(20):
        now = 1000.0 * number
        brain.members.register_store(store(), now)
        brain.fleet.workers.register(worker("decode-0", Role.DECODE), now)
        brain.register_worker(worker(f"prefill-{number}", Role.PREFILL), now)
        begin(brain, ask(f"r{number}", names=names), now)
        brain.prefill_finished(f"r{number}", 0, 0, now)
        brain.finish(f"r{number}", status=200, output_tokens=1, now=now)
        brain.tick(now)
    # The last worker, and the store that all of them shared.
    assert repr(brain.index) == "<PageIndex 2 holders, 0 pages, 50 sent>"


def test_a_decision_keeps_what_each_candidate_would_have_cost() -> None:
    brain = fleet(prefill=6, decode=2)
    begin(brain, ask("busy", (700,)))
    begin(brain, ask("r1", (100,) * 20))
    request, *prefills = brain.ledger.get("r1").report()["decision"]  # type: ignore[union-attr, misc]
    assert (request["about"], request["prefill_worker"], request["decode_worker"]) == (
        "request",
        "prefill-1",
        "decode-1",
    )
    assert request["cost_s"].keys() == {str(item) for item in Item}
    assert request["cost_s"]["queue"] == 0.0
    assert len(request["runners_up"]) == 3
    assert (len(prefills), {choice["about"] for choice in prefills}) == (7, {"prefill"})


@pytest.mark.parametrize("how", ["leaves", "is reborn"])
def test_a_worker_that_is_surely_gone_loses_everything(how: str) -> None:
    brain = fleet()
    begin(brain, ask())
    if how == "leaves":
        commands = brain.leaving(worker("decode-0", Role.DECODE), 0.1)
        commands += brain.leaving(worker("prefill-0", Role.PREFILL), 0.1)
    else:
        commands = brain.register_worker(worker("decode-0", Role.DECODE, incarnation="i2"), 0.1)
        commands += brain.register_worker(worker("prefill-0", Role.PREFILL, incarnation="i2"), 0.1)
    assert commands == [AbandonDecode(request_id="r1"), AbandonPrefill(request_id="r1", index=0)]


def test_a_goodbye_of_an_old_incarnation_changes_nothing() -> None:
    brain = fleet()
    brain.register_worker(worker("decode-0", Role.DECODE, incarnation="i2"), 0.1)
    assert brain.leaving(worker("decode-0", Role.DECODE, incarnation="i1"), 0.0) == []
    assert begin(brain, ask(), 0.2).path is Path.REMOTE_PREFILL


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "path", "reason"),
    [
        (1, 1, 0, Path.REMOTE_PREFILL, ""),
        (0, 1, 0, Path.LOCAL, "no_prefill"),
        (0, 0, 2, Path.LOCAL, "colocated"),
        (1, 0, 1, Path.REMOTE_PREFILL, ""),
    ],
)
def test_roles_decide_whether_a_request_is_split(prefill: int, decode: int, both: int, path: Path, reason: str) -> None:
    plan = begin(fleet(prefill, decode, both), ask())
    assert (plan.path, plan.local_reason) == (path, reason)


def test_a_both_worker_prefills_for_a_decode_worker() -> None:
    brain = fleet(prefill=0, decode=1, both=1)
    plans = [begin(brain, ask(f"r{number}", (1000,))) for number in range(8)]
    orders = [order.worker for plan in plans for order in plan.prefills]
    assert orders
    assert set(orders) == {"both-0"}


def test_a_fleet_whose_prefill_workers_died_says_so() -> None:
    brain = fleet()
    brain.leaving(worker("prefill-0", Role.PREFILL), 0.0)
    assert begin(brain, ask()).local_reason == "no_prefill"


def test_unlike_workers_are_no_pair_even_if_the_one_that_prefills_does_both() -> None:
    brain = fleet(prefill=0)
    brain.register_worker(worker("both", weights="other"), 0.0)
    reasons = {}
    for name in ("r1", "r2"):
        reason = begin(brain, ask(name)).local_reason
        reasons[brain.decode_order(name, 0.0).worker] = reason
    assert reasons == {"both": "colocated", "decode-0": "no_pair"}


def test_a_dead_store_means_no_hand_off() -> None:
    brain = fleet()
    brain.fleet.stores.leave("s1", "i1")
    plan = begin(brain, ask())
    assert (plan.path, plan.local_reason) == (Path.LOCAL, "no_pair")


def test_too_many_prompts_are_not_split() -> None:
    assert begin(fleet(), ask(prompts=(1,) * 65)).local_reason == "many_prompts"
    assert begin(fleet(), ask(prompts=(1,) * 64)).local_reason == ""


def test_without_a_worker_that_decodes_nobody_gets_in() -> None:
    brain = fleet(prefill=1, decode=0)
    with pytest.raises(Overloaded, match="no worker that can write answers"):
        brain.begin(ask(), 0.0)
    assert brain.in_flight == 0
    brain.check_invariants()


def test_each_d_is_tried_once() -> None:
    brain = fleet(prefill=0, decode=3)
    begin(brain, ask())
    seen = [brain.decode_order("r1", 0.0).worker]
    while brain.decode_refused("r1", 0.1):
        seen.append(brain.decode_order("r1", 0.1).worker)
        brain.check_invariants()
    assert sorted(seen) == ["decode-0", "decode-1", "decode-2"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_requests_with_faults_leave_nothing_behind() -> None:
    brain, chance = fleet(prefill=3, decode=3, dead_after_s=1e9), random.Random(1)
    open_requests: list[tuple[str, Plan]] = []
    for number in range(10_000):
        name, now = f"r{number}", float(number)
        open_requests.append((name, begin(brain, ask(name, (chance.randint(1, 500),) * chance.randint(1, 2)), now)))
        for order in open_requests[-1][1].prefills:
            fate = chance.random()
            if fate < 0.1:
                brain.prefill_failed(name, order.index, now)
            elif fate < 0.6:
                brain.transfer_event(says(order.transfer, chance.choice(list(Stage))), now)
            elif fate < 0.9:
                brain.prefill_finished(name, order.index, 3, now)
        if chance.random() < 0.1:
            brain.decode_refused(name, now)
        if len(open_requests) > 50:
            done, _ = open_requests.pop(chance.randrange(50))
            brain.decode_order(done, now)
            brain.finish(done, status=200, output_tokens=1, now=now)
    brain.check_invariants()
    for name, _ in open_requests:
        brain.finish(name, status=499, output_tokens=0, now=now)
    brain.check_invariants()
    assert (brain.in_flight, repr(brain.loads)) == (0, "<Loads 0 prefill legs, 0 sequences>")
    assert repr(brain.ledger).startswith("<Ledger 0 running, 1000/1000 over")


def test_a_hot_prefix_spreads_when_its_worker_queues() -> None:
    brain, chance = fleet(prefill=4), random.Random(3)
    hot = tuple(name_pages(root_name(fingerprint()), range(400), 4))
    running: list[str] = []
    chosen: Counter[str] = Counter()
    for number in range(400):
        name = f"r{number}"
        names = hot if chance.random() < 0.9 else tuple(name_pages(root_name(fingerprint(), salt=name), range(400), 4))
        chosen[begin(brain, ask(name, (410,), names=names)).prefills[0].worker] += 1
        running.append(name)
        if len(running) > 8:
            done = running.pop(0)
            brain.prefill_finished(done, 0, 0, 0.0)
            brain.finish(done, status=200, output_tokens=1, now=0.0)
    assert max(chosen.values()) <= 2 * 400 / 4


def refuse(brain: Brain, name: str, now: float) -> None:
    """One request whose only D answers with a 5xx."""
    begin(brain, ask(name), now)
    brain.decode_order(name, now)
    assert not brain.decode_refused(name, now)
    brain.finish(name, status=503, output_tokens=0, now=now)


def test_fifty_refusals_of_requests_do_not_open_a_breaker() -> None:
    brain = fleet(prefill=0)
    for number in range(50):
        begin(brain, ask(f"r{number}"))
        brain.decode_order(f"r{number}", 0.0)
        brain.finish(f"r{number}", status=400, output_tokens=0, now=0.0)
    assert repr(brain.outcomes.breakers) == "<Breakers open: none>"


def test_failures_of_a_d_open_its_breaker_and_one_good_answer_closes_it() -> None:
    brain = fleet(prefill=0)
    for number in range(5):
        refuse(brain, f"r{number}", 0.0)
    with pytest.raises(Overloaded) as refused:
        brain.begin(ask("r5"), 0.5)
    assert refused.value.after_s == 1.0
    begin(brain, ask("probe"), 1.0)
    with pytest.raises(Overloaded):
        brain.begin(ask("r6"), 1.0)  # one at a time
    brain.first_token("probe", 1.1)
    begin(brain, ask("r7"), 1.1)
    brain.check_invariants()


def test_old_answers_that_end_well_do_not_keep_a_d_that_fails_all_new_requests() -> None:
    brain = fleet(prefill=0)
    for number in range(8):
        begin(brain, ask(f"old{number}"))
        brain.decode_order(f"old{number}", 0.0)
        brain.first_token(f"old{number}", 0.1)
    for number in range(5):
        refuse(brain, f"r{number}", 1.0)
        brain.finish(f"old{number}", status=200, output_tokens=9, now=1.0)
    assert not brain.outcomes.breakers.allows("decode-0", 1.5)
    begin(brain, ask("probe"), 2.0)
    brain.decode_order("probe", 2.0)
    brain.finish("old5", status=200, output_tokens=9, now=2.1)
    brain.finish("old6", status=502, output_tokens=9, now=2.1)
    assert brain.outcomes.breakers.of("decode-0").probe == "probe", "it is on its way still"
    brain.first_token("probe", 2.2)
    assert len(brain.outcomes.breakers) == 0
    brain.finish("old7", status=200, output_tokens=9, now=2.3)


def test_while_every_p_fails_d_computes_prompts_itself() -> None:
    brain = fleet()
    for number in range(5):
        begin(brain, ask(f"r{number}"))
        assert brain.prefill_failed(f"r{number}", 0, 0.0) == [DispatchDecode(request_id=f"r{number}")]
    plan = begin(brain, ask("local"))
    assert (plan.path, plan.local_reason) == (Path.LOCAL, "no_prefill")
    assert begin(brain, ask("probe"), 1.0).path is Path.REMOTE_PREFILL
    assert begin(brain, ask("local too"), 1.0).path is Path.LOCAL
    brain.prefill_finished("probe", 0, 0, 1.1)
    assert begin(brain, ask("split"), 1.1).path is Path.REMOTE_PREFILL


def test_a_prefill_that_was_called_off_blames_nobody() -> None:
    brain = fleet()
    for number in range(50):
        begin(brain, ask(f"r{number}"))
        brain.prefill_failed(f"r{number}", 0, 0.0, blamed=False)
    assert begin(brain, ask("split")).path is Path.REMOTE_PREFILL


def test_a_probe_whose_client_went_away_makes_room_for_another() -> None:
    brain = fleet(prefill=0)
    for number in range(5):
        refuse(brain, f"r{number}", 0.0)
    begin(brain, ask("probe"), 1.0)
    brain.finish("probe", status=499, output_tokens=0, now=1.1)
    begin(brain, ask("another"), 1.1)


def test_a_restarted_worker_has_a_clean_record() -> None:
    brain = fleet(prefill=0)
    for number in range(5):
        refuse(brain, f"r{number}", 0.0)
    brain.register_worker(worker("decode-0", Role.DECODE, incarnation="i2"), 0.1)
    begin(brain, ask("fresh"), 0.1)


def failing(brain: Brain) -> None:
    """``decode-0`` failed so often that it gets a probe alone, from 1 s on."""
    for number in range(5):
        begin(brain, ask(f"x{number}"))
        brain.decode_order(f"x{number}", 0.0)
        brain.decode_refused(f"x{number}", 0.0)
        brain.finish(f"x{number}", status=503, output_tokens=0, now=0.0)


def test_a_d_is_probed_at_once_and_not_when_a_p_is_done() -> None:
    brain = fleet()
    failing(brain)
    plan = begin(brain, ask("probe"), 1.0)
    assert (plan.path, plan.local_reason) == (Path.LOCAL, "probe")
    brain.first_token("probe", 1.1)
    assert begin(brain, ask("next"), 1.2).path is Path.REMOTE_PREFILL


def test_an_older_request_that_is_called_off_lets_no_second_probe_in() -> None:
    brain = fleet()
    begin(brain, ask("old"))
    brain.decode_order("old", 0.0)
    failing(brain)
    begin(brain, ask("probe"), 1.0)
    brain.finish("old", status=499, output_tokens=0, now=1.1)
    with pytest.raises(Overloaded):
        brain.begin(ask("second"), 1.1)
    brain.finish("probe", status=499, output_tokens=0, now=1.2)
    begin(brain, ask("third"), 1.2)


def test_a_d_that_computes_several_prompts_has_all_of_them_before_it() -> None:
    brain = known_brain([], [("d0", "s1")])
    facts = RequestFacts(request_id="r1", model="tiny", prompt_tokens=(1000,) * 8, max_tokens=4, page_names=())
    begin(brain, Ask(facts=facts, sequences=8, received_s=0.0))
    assert brain.loads.wait_s("d0", 0.0) == pytest.approx(8.0, rel=0.1)


def test_what_a_former_router_learned_of_ways_waits_for_their_stores() -> None:
    brain = fleet(dead_after_s=2.0)
    brain.experience.recall(Learned(ways={'["a","b"]': link()}))
    brain.tick(0.0)
    brain.tick(FORGET_S)
    assert list(brain.experience.learned().ways) == ['["a","b"]']
    brain.tick(FORGET_S + 1.0)
    assert not brain.experience.learned().ways


def test_of_a_model_that_nobody_serves_any_more_nothing_is_kept() -> None:
    brain = fleet()
    begin(brain, ask())
    assert "tiny" in repr(brain._chooser._topologies)
    for role in (Role.PREFILL, Role.DECODE):
        brain.leaving(worker(f"{role.value}-0", role), 0.1)
    brain.tick(0.2)
    assert repr(brain._chooser._topologies) == "<Topologies of no model>"


def test_a_d_that_was_forgotten_is_a_lost_one_so_that_another_answers() -> None:
    brain = fleet(decode=2)
    begin(brain, ask())
    gone = brain.decode_order("r1", 0.0).worker
    brain.fleet.workers.leave(gone, "i1")
    brain.fleet.workers.expire(FORGET_S + 1.0)
    with pytest.raises(Unasked, match="is gone"):
        brain.decode_order("r1", FORGET_S + 1.0)
