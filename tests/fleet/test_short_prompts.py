"""Where short prompts go: to an idle P, and not behind a long prompt when D computes them at less cost to everybody."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.experience import ENOUGH_HANDOFFS
from kvrelay.fleet.flight import Ask
from kvrelay.policy.route import Path
from kvrelay.types import Role, WorkerInfo
from tests.fleet.known import TOKEN_S, Told, ask, known_brain, member, prompt_names
from tests.fleet.values import begun

SHORT, LONG = 64, 1500


def sharing(name: str, role: Role) -> WorkerInfo:
    """One whose prompts take up to 48 tokens of a step that others want, and 24 beside answers."""
    made = member(name, role)
    engine = msgspec.structs.replace(made.engine, shared_chunk_tokens=48)
    return msgspec.structs.replace(made, engine=engine, incarnation="i2")


def choosing(streams: int) -> Brain:
    """A P, and a D that writes ``streams`` answers; hand-offs are known."""
    brain = known_brain([("p0", "s1")])
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        brain.register_worker(sharing(name, role), 0.0)
    for number in range(streams):
        name, now = f"stream {number}", 0.1 * number
        begun(brain, ask(name, (number + 1, SHORT), now=now), now)
        brain.prefill_finished(name, 0, 0, now + SHORT * TOKEN_S)
        brain.decode_order(name, now + 0.07)
        brain.first_token(name, now + 0.08)
    brain.experience.handoffs = ENOUGH_HANDOFFS
    return brain


@pytest.mark.parametrize(
    ("streams", "path"),
    [
        (2, Path.LOCAL),
        (12, Path.REMOTE_PREFILL),  # twelve streams that pause are worse than one prompt that waits for a step
    ],
)
def test_a_short_prompt_does_not_queue_behind_a_long_one_when_d_has_time_for_it(streams: int, path: Path) -> None:
    brain = choosing(streams)
    assert begun(brain, ask("long", (50, LONG), now=9.0), 9.0).path is Path.REMOTE_PREFILL
    plan = begun(brain, ask("short", (60, SHORT), now=9.1), 9.1)
    assert (plan.path, plan.local_reason) == (path, "cheaper" if path is Path.LOCAL else "")
    brain.check_invariants()


def test_a_short_prompt_goes_to_an_idle_p() -> None:
    brain = choosing(2)
    assert begun(brain, ask("short", (60, SHORT), now=9.0), 9.0).path is Path.REMOTE_PREFILL


def test_several_short_prompts_at_once_do_not_all_stop_the_same_streams() -> None:
    brain = choosing(2)
    begun(brain, ask("long", (50, LONG), now=9.0), 9.0)
    paths = [begun(brain, ask(f"short {number}", (60 + number, SHORT), now=9.1), 9.1).path for number in range(6)]
    assert set(paths) == {Path.LOCAL, Path.REMOTE_PREFILL}
    brain.check_invariants()


def test_a_turn_stays_on_the_d_that_wrote_the_one_before() -> None:
    brain = choosing(2)
    history = ((70, 1000), (71, 40))
    Told(brain).has(sharing("p0", Role.PREFILL), prompt_names(history[0]), 9.0)
    Told(brain).has(sharing("d0", Role.DECODE), prompt_names(*history), 9.0)
    plan = begun(brain, ask("turn", *history, (72, 8), now=9.0), 9.0)
    assert (plan.path, plan.local_reason) == (Path.LOCAL, "cheaper")
    chosen = brain.ledger.get("turn").predicted  # type: ignore[union-attr]
    assert chosen is not None
    assert chosen.cached_tokens == 1040


def test_a_prompt_that_others_passed_is_not_late() -> None:
    """Else the next short one would wait for it in vain."""
    brain = choosing(12)
    begun(brain, ask("long", (50, LONG), now=9.0), 9.0)
    for number in range(4):
        now = 9.1 + 0.4 * number
        assert begun(brain, ask(f"short {number}", (60 + number, SHORT), now=now), now).prefills
        brain.prefill_finished(f"short {number}", 0, 0, now + 0.1)
    almost_s = LONG * TOKEN_S - 0.1
    assert brain.loads.wait_s("p0", 9.0 + almost_s, SHORT * TOKEN_S) < 0.1


@pytest.mark.parametrize("ends", ["failed", "cancelled"])
def test_a_prompt_that_was_not_computed_delays_nobody(ends: str) -> None:
    brain = choosing(12)
    begun(brain, ask("long", (50, LONG), now=9.0), 9.0)
    before_s = brain.loads.wait_s("p0", 9.5)
    assert begun(brain, ask("short", (60, SHORT), now=9.1), 9.1).prefills
    if ends == "failed":
        brain.prefill_failed("short", 0, 9.5, blamed=False)
    brain.finish("short", status=499, output_tokens=0, now=9.5)
    assert brain.loads.wait_s("p0", 9.5) == pytest.approx(before_s)
    brain.check_invariants()


def test_a_step_of_prompts_that_stay_together_is_of_all_of_them() -> None:
    brain, facts = choosing(0), ask("r", (60, SHORT)).facts
    lengths = (100, 40, 100)
    facts = msgspec.structs.replace(facts, prompt_tokens=lengths, page_names=())
    whole = Ask(facts=facts, received_s=0.0, local_reason="logprobs")
    pick = brain._chooser.begin(whole, brain._chooser.topology("tiny", 0.0), 0.0)
    assert pick is not None
    reserved = pick.decode_reservation(whole)
    assert reserved.prefill_s / reserved.step_s == pytest.approx(math.ceil(sum(lengths) / 24))


def test_who_waits_for_its_prompt_does_not_run_yet() -> None:
    brain = choosing(0)
    begun(brain, ask("r", (60, SHORT)), 0.0)
    seen = [brain.loads.running["d0"]]
    for _ in range(2):  # the second order is for another try
        brain.decode_order("r", 0.1)
        seen.append(brain.loads.running["d0"])
    brain.check_invariants()
    brain.finish("r", status=200, output_tokens=1, now=0.2)
    assert [*seen, brain.loads.running["d0"]] == [0, 1, 1, 0]
