"""Requests are split only within pairs that understand each other, while two revisions or KV types share one fleet."""

from __future__ import annotations

from collections import Counter

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask
from kvrelay.identity import name_pages, root_name, root_of
from kvrelay.policy.route import Path
from kvrelay.types import PromptNames, RequestFacts, Role
from tests.fleet.values import begun, fingerprint, store, worker


def fleet(*, convert: bool = False) -> Brain:
    brain = Brain(dead_after_s=2.0, transfer_wait_s=10.0, convert_kv_dtype=convert)
    brain.members.register_store(store(), 0.0)
    return brain


def ask(number: int, names: PromptNames | None = None) -> Ask:
    facts = RequestFacts(
        request_id=f"r{number}", model="tiny", prompt_tokens=(100,), max_tokens=16, page_names=(names or {},)
    )
    return Ask(facts=facts, received_s=0.0)


def test_in_a_rolling_upgrade_every_request_stays_within_one_revision() -> None:
    brain = fleet()
    for weights in ("old", "new"):
        for role in (Role.PREFILL, Role.DECODE):
            brain.register_worker(worker(f"{role.value}-{weights}", role, weights=weights), 0.0)
    pairs: Counter[tuple[str, str]] = Counter()
    for number in range(20):
        plan = begun(brain, ask(number))
        assert plan.path is Path.REMOTE_PREFILL
        pairs[plan.prefills[0].worker, brain.decode_order(f"r{number}", 0.0).worker] += 1
    assert set(pairs) == {("prefill-old", "decode-old"), ("prefill-new", "decode-new")}


def test_a_decode_worker_that_nobody_understands_computes_its_prompts_itself() -> None:
    brain = fleet()
    brain.register_worker(worker("p", Role.PREFILL, weights="old"), 0.0)
    brain.register_worker(worker("d", Role.DECODE, weights="new"), 0.0)
    plan = begun(brain, ask(1))
    assert (plan.path, plan.local_reason) == (Path.LOCAL, "no_pair")


def test_a_like_pair_is_preferred_to_one_that_converts() -> None:
    brain = fleet(convert=True)
    brain.register_worker(worker("d", Role.DECODE), 0.0)
    brain.register_worker(worker("p-unlike", Role.PREFILL, dtype="float32"), 0.0)
    brain.register_worker(worker("p-like", Role.PREFILL), 0.0)
    for number in range(5):
        assert begun(brain, ask(number)).prefills[0].worker == "p-like"
        assert brain.decode_order(f"r{number}", 0.0).page_dtypes == ()


def test_another_d_that_takes_over_converts_nothing_unless_that_is_allowed() -> None:
    orders = []
    for convert in (False, True):
        brain = fleet(convert=convert)
        brain.register_worker(worker("d", Role.DECODE), 0.0)
        brain.register_worker(worker("p", Role.PREFILL), 0.0)
        assert begun(brain, ask(1)).path is Path.REMOTE_PREFILL
        brain.register_worker(worker("d-unlike", Role.DECODE, dtype="float32"), 0.0)
        assert brain.decode_refused("r1", 0.0)
        orders.append(brain.decode_order("r1", 0.0))
    assert [order.worker for order in orders] == ["d-unlike", "d-unlike"]
    assert [order.page_dtypes for order in orders] == [(), ("bfloat16",)]


def test_without_a_like_pair_d_is_told_which_type_to_convert() -> None:
    brain = fleet(convert=True)
    brain.members.register_store(store("s2", "127.0.0.1:9002"), 0.0)
    brain.register_worker(worker("d", Role.DECODE, store="s2"), 0.0)
    brain.register_worker(worker("p", Role.PREFILL, dtype="float32"), 0.0)
    plan = begun(brain, ask(1))
    assert plan.prefills[0].push_to == "127.0.0.1:9002"
    order = brain.decode_order("r1", 0.0)
    assert (order.page_dtypes, order.home) == (("float32",), None)


def named(brain: Brain) -> PromptNames:
    """The names of one prompt in all the ways in which workers of ``brain`` name it."""
    prints = brain.namings("tiny", 0.0)
    return {root: tuple(name_pages(root_name(each), range(100), 4)) for root, each in prints.items()}


def test_what_workers_hold_is_known_in_each_revision_s_own_names() -> None:
    brain = fleet()
    for weights in ("old", "new"):
        for role in (Role.PREFILL, Role.DECODE):
            brain.register_worker(worker(f"{role.value}-{weights}", role, weights=weights), 0.0)
    names = named(brain)
    assert names.keys() == {root_of(fingerprint("old")), root_of(fingerprint("new"))}
    cached: dict[str, list[int]] = {}
    for number in range(8):
        name, plan = f"r{number}", begun(brain, ask(number, names))
        reasons = brain.ledger.get(name).predicted  # type: ignore[union-attr]
        assert reasons is not None
        cached.setdefault(plan.prefills[0].worker, []).append(reasons.cached_tokens)
        brain.prefill_finished(name, 0, 0, 0.0)
        brain.finish(name, status=200, output_tokens=1, now=0.0)
    # Each revision computes the prompt once; who held it after that was known whatever the other one calls it.
    assert {tokens for seen in cached.values() for tokens in seen[1:]} == {99}
    assert max(map(len, cached.values())) >= 7


def test_of_many_kinds_of_workers_the_most_common_are_asked_about() -> None:
    brain = fleet()
    for number in range(8):
        brain.register_worker(worker(f"odd-{number}", weights=f"w{number}"), 0.0)
        brain.register_worker(worker(f"like-{number}"), 0.0)
    known = brain.namings("tiny", 0.0)
    assert len(known) == 4
    assert next(iter(known)) == root_of(fingerprint())


def test_pages_of_another_type_count_with_their_own_size() -> None:
    brain = fleet(convert=True)
    brain.members.register_store(store("s2", "127.0.0.1:9002"), 0.0)
    brain.register_worker(worker("d", Role.DECODE, store="s2"), 0.0)
    brain.register_worker(worker("p", Role.PREFILL, dtype="float32"), 0.0)
    begun(brain, ask(1, named(brain)))
    wide = fingerprint(dtype="float32").format
    here, there = brain.loads.links.rows(["s1", "s2"])
    assert brain.loads.links.tables.in_flight_bytes[here][there] == 100 * wide.layers * wide.token_layer_bytes
