"""Who gets in, who waits, who is refused."""

from __future__ import annotations

import pytest

from kvrelay.policy.admit import Accepted, Despite, Held, Limits, Outlook, Slo, Turned, admit, is_kept, judge

HOLDS = Limits(queue_s=2.0, hold_s=10.0)
Verdict = type[Accepted] | type[Held] | type[Turned]


def outlook(**more: float | bool) -> Outlook:
    known = {"ttft_s": 0.5, "tpot_s": 0.02, "sure": True, "tpot_sure": True}
    return Outlook(**known | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("in_flight", "decoders", "enters"), [(0, 1, True), (9, 1, True), (10, 1, False), (0, 0, False)]
)
def test_a_request_enters_when_somebody_can_answer_and_there_is_room(
    in_flight: int, decoders: int, enters: bool
) -> None:
    verdict = admit(in_flight=in_flight, decoders=decoders, limit=10)
    assert isinstance(verdict, Accepted if enters else Turned)


@pytest.mark.parametrize(
    ("own", "in_flight", "enters"), [(79, 79, True), (80, 80, False), (40, 84, True), (41, 85, False)]
)
def test_a_tenant_has_no_more_places_than_eight_times_those_that_are_free(
    own: int, in_flight: int, enters: bool
) -> None:
    verdict = admit(in_flight=in_flight, own=own, decoders=1, limit=90)
    assert isinstance(verdict, Accepted if enters else Turned)


@pytest.mark.parametrize("tenants", [1, 2, 10, 40])
def test_however_many_tenants_take_all_they_may_the_next_one_finds_a_place(tenants: int) -> None:
    own, limit = [0] * tenants, 360
    for _ in range(limit):
        for at in range(tenants):
            own[at] += isinstance(admit(in_flight=sum(own), own=own[at], decoders=1, limit=limit), Accepted)
    assert isinstance(admit(in_flight=sum(own), decoders=1, limit=limit), Accepted)


@pytest.mark.parametrize(("back_in_s", "after_s"), [(0.0, 1.0), (7.0, 7.0)])
def test_who_is_turned_away_is_told_when_to_come_back(back_in_s: float, after_s: float) -> None:
    verdict = admit(in_flight=0, decoders=0, back_in_s=back_in_s)
    assert isinstance(verdict, Turned)
    assert verdict.after_s == after_s
    assert "/health" in verdict.reason


@pytest.mark.parametrize(
    ("slo", "more", "verdict"),
    [
        (Slo(), {}, Accepted),
        (Slo(), {"ttft_s": 900.0, "tpot_s": 9.0}, Accepted),
        (Slo(ttft_s=0.5), {}, Accepted),
        (Slo(ttft_s=0.49), {}, Turned),
        # What it has waited already counts, and what it will wait.
        (Slo(ttft_s=1.0), {"waited_s": 0.5}, Accepted),
        (Slo(ttft_s=1.0), {"waited_s": 0.51}, Turned),
        (Slo(ttft_s=1.0), {"ahead_s": 0.51}, Turned),
        (Slo(ttft_s=1.0), {"ahead_s": 0.51, "overtakes": True}, Accepted),
        (Slo(tpot_s=0.02), {}, Accepted),
        (Slo(tpot_s=0.019), {}, Turned),
        # Nobody is refused on a guess.
        (Slo(ttft_s=0.1), {"sure": False}, Accepted),
        (Slo(ttft_s=0.1), {"guessed_s": 0.4}, Accepted),
        (Slo(ttft_s=0.1), {"guessed_s": 0.39}, Turned),
        (Slo(tpot_s=0.019), {"tpot_sure": False}, Accepted),
        (Slo(tpot_s=0.019), {"sure": False}, Turned),
        # Nor is one that is to show whether the predictions hold; to be alone is not enough.
        (Slo(ttft_s=0.1), {"alone": True, "trial_due": True}, Accepted),
        (Slo(ttft_s=0.1), {"alone": True}, Turned),
    ],
)
def test_a_request_that_would_miss_its_promise_is_refused_early(
    slo: Slo, more: dict[str, float | bool], verdict: Verdict
) -> None:
    assert isinstance(judge(slo, outlook(**more), HOLDS), verdict)


@pytest.mark.parametrize(
    ("slo", "more", "despite"),
    [
        (Slo(), {}, None),
        (Slo(ttft_s=0.5), {"trial_due": True}, None),
        (Slo(ttft_s=0.1), {"sure": False}, Despite.GUESS),
        (Slo(ttft_s=0.1), {"guessed_s": 0.4, "trial_due": True}, Despite.GUESS),
        (Slo(ttft_s=0.1), {"alone": True, "trial_due": True}, Despite.TRIAL),
        (Slo(tpot_s=0.019), {"alone": True, "trial_due": True}, Despite.TRIAL),
    ],
)
def test_who_is_let_in_all_the_same_is_told_why(
    slo: Slo, more: dict[str, float | bool], despite: Despite | None
) -> None:
    assert judge(slo, outlook(**more), HOLDS) == Accepted(despite=despite)


@pytest.mark.parametrize(
    ("slo", "ttft_s", "tpot_s", "kept"),
    [
        (Slo(ttft_s=1.0), 1.0, None, True),
        (Slo(ttft_s=1.0), 1.1, None, False),
        (Slo(ttft_s=1.0), None, None, False),
        (Slo(tpot_s=0.1), 5.0, 0.1, True),
        (Slo(tpot_s=0.1), 5.0, 0.2, False),
    ],
)
def test_a_promise_is_kept_by_the_times_that_were_seen(
    slo: Slo, ttft_s: float | None, tpot_s: float | None, kept: bool
) -> None:
    assert is_kept(slo, ttft_s, tpot_s) is kept


def test_a_refusal_says_how_late_it_would_be_and_when_to_retry() -> None:
    verdict = judge(Slo(ttft_s=1.0), outlook(ttft_s=4.5), HOLDS)
    assert isinstance(verdict, Turned)
    assert (verdict.kind, verdict.after_s) == ("ttft", 3.5)
    assert verdict.reason == "the first token is predicted after 4.5 s, and 1 s were asked for; retry later"


@pytest.mark.parametrize(
    ("limits", "more", "verdict"),
    [
        (HOLDS, {"room": False}, Held),
        (HOLDS, {"ahead_s": 3.0}, Held),
        (HOLDS, {"ahead_s": 3.0, "overtakes": True}, Accepted),
        (HOLDS, {"ahead_s": 3.0, "overtakes": True, "room": False}, Held),
        (HOLDS, {"ahead_s": 10.1}, Turned),
        (HOLDS, {"ahead_s": 10.1, "sure": False}, Held),
        (HOLDS, {"room": False, "alone": True}, Accepted),
        (Limits(), {"room": False, "ahead_s": 99.0}, Accepted),
    ],
)
def test_who_finds_no_room_waits_in_the_router_if_that_is_allowed(
    limits: Limits, more: dict[str, float | bool], verdict: Verdict
) -> None:
    assert isinstance(judge(Slo(), outlook(**more), limits), verdict)


@pytest.mark.parametrize(
    ("ttft_s", "more", "until_s"),
    [
        (None, {}, 10.5),
        (60.0, {}, 10.5),
        (4.0, {}, 3.5),
        # The wait at its worker passes while it waits here.
        (4.0, {"ttft_s": 2.5, "queued_s": 2.0}, 3.5),
        (4.0, {"sure": False}, 4.0),
    ],
)
def test_nobody_waits_until_its_workers_would_compute_in_vain(
    ttft_s: float | None, more: dict[str, float | bool], until_s: float
) -> None:
    verdict = judge(Slo(ttft_s=ttft_s), outlook(room=False, waited_s=0.5, **more), HOLDS)
    assert verdict == Held(until_s=until_s)
