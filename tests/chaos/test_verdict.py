"""What became of answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.deploy.chaos.leaks import _held, _samples
from kvrelay.deploy.chaos.verdict import Seen, Tally, Verdict, judge

WHOLE = "one two three"


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ({"text": WHOLE, "status": 200, "done": True}, Verdict.RIGHT),
        ({"text": "one two", "status": 200, "done": True}, Verdict.WRONG),
        ({"text": "one too", "status": 200, "done": True}, Verdict.WRONG),
        ({"text": "one too", "status": 200, "error": True}, Verdict.WRONG),
        ({"text": "one tw", "status": 200, "error": True}, Verdict.ENDED),
        ({"text": "one tw", "status": 200, "error": True, "done": True}, Verdict.WRONG),
        ({"text": "one one", "cancelled": True, "status": 200}, Verdict.WRONG),
        ({"text": "one", "cancelled": True, "status": 200}, Verdict.CANCELLED),
        ({"text": "one", "status": 200}, Verdict.CUT),
        ({"status": 503}, Verdict.REFUSED),
        ({}, Verdict.CUT),
        ({"text": "one", "hung": True, "status": 200}, Verdict.HUNG),
        ({"text": WHOLE + " four", "status": 200}, Verdict.WRONG),
    ],
)
def test_only_a_whole_and_equal_answer_is_right(seen: dict[str, Any], verdict: Verdict) -> None:
    assert judge(Seen(**seen), WHOLE) is verdict


def test_a_tally_keeps_the_pauses_of_right_answers_and_what_went_wrong() -> None:
    tally = Tally()
    for pause_s in (0.1, 0.4, 0.2):
        tally.add(Seen(text=WHOLE, status=200, done=True, longest_pause_s=pause_s), WHOLE, "q")
    tally.add(Seen(text="x", status=200, done=True, longest_pause_s=9.0), WHOLE, "question 3")
    assert (tally.pause_s(0.5), tally.pause_s(1.0)) == (0.2, 0.4)
    assert tally.verdicts == {Verdict.RIGHT: 3, Verdict.WRONG: 1}
    assert "question 3" in tally.failures[0]


def test_what_was_not_answered_is_counted_by_what_was_said_of_it() -> None:
    tally = Tally()
    for number in range(2):
        tally.add(Seen(status=503, said=f"{number}.5 s of work wait; retry"), WHOLE, "q")
    tally.add(Seen(text="one", status=200, error=True, said="its worker is gone"), WHOLE, "q")
    tally.add(Seen(text="one", status=200), WHOLE, "q")
    tally.add(Seen(), WHOLE, "q")
    tally.add(Seen(cancelled=True, status=200), WHOLE, "q")
    tally.add(Seen(text=WHOLE, status=200, done=True), WHOLE, "q")
    assert tally.causes == {
        "refused with 503: N s of work wait; retry": 2,
        "ended: its worker is gone": 1,
        "cut: its connection broke": 1,
        "cut: no answer at all": 1,
    }


def test_of_causes_that_differ_each_time_only_some_are_told() -> None:
    tally = Tally()
    for number in range(100):
        tally.add(Seen(status=500, said="x" * number), WHOLE, "q")
    assert len(tally.causes) == 33
    assert tally.causes.total() == 100


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ("kvrelay_in_flight 0.0", []),
        ("kvrelay_in_flight 1.0", ["kvrelay_in_flight{} 1"]),
        (
            'kvrelay_decode_sequences{role="decode",worker="d"} 2.0',
            ["kvrelay_decode_sequences{'role': 'decode', 'worker': 'd'} 2"],
        ),
        (
            'kvrelay_store_count{count="leases_open",store="s"} 1.0',
            ["kvrelay_store_count{'count': 'leases_open', 'store': 's'} 1"],
        ),
        ('kvrelay_store_count{count="pages_used",store="s"} 7.0', []),
        (
            'kvrelay_store_count{count="slots_failed",store="s"} 1.0',
            ["kvrelay_store_count{'count': 'slots_failed', 'store': 's'} 1"],
        ),
        (
            'kvrelay_worker_count{count="kv_blocks_used",worker="d"} 3.0',
            ["kvrelay_worker_count{'count': 'kv_blocks_used', 'worker': 'd'} 3"],
        ),
        ('kvrelay_worker_count{count="handoffs_malformed",worker="d"} 3.0', []),
        ('kvrelay_worker_ready{role="decode",worker="d"} 1.0', []),
        ("# HELP kvrelay_in_flight Requests in flight.", []),
    ],
)
def test_what_is_held_shows_in_gauges_that_are_zero_at_rest(line: str, held: list[str]) -> None:
    assert list(_held(_samples(line))) == held


def occupied(**counts: int) -> str:
    told = {"slots_occupied": 9, "pages_used": 5, "slots_granted": 4, "slots_failed": 0} | counts
    return "\n".join(f'kvrelay_store_count{{count="{name}",store="s"}} {count}.0' for name, count in told.items())


def test_slots_that_nobody_can_use_are_lost() -> None:
    assert list(_held(_samples(occupied()))) == []
    assert list(_held(_samples(occupied(pages_used=3)))) == ["s lost 2 slots"]


def test_failures_whose_story_is_known_are_told_however_late_they_come() -> None:
    tally = Tally()
    for number in range(30):
        tally.add(Seen(hung=True, status=200), WHOLE, f"question {number}")
    tally.add(Seen(hung=True, status=200, story="it waits for decode"), WHOLE, "question 99")
    assert tally.failures[0].startswith("question 99: hung: it waits for decode;")
    assert len(tally.failures) == 11
