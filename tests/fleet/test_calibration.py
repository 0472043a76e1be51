"""Predictions against what happened."""

from __future__ import annotations

import pytest

from kvrelay.fleet.actual import Actual, actual
from kvrelay.fleet.calibration import Calibration, regret_s
from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.cost import Item, Kind, Source
from kvrelay.policy.route import Decision, Option, Path


def option(ttft_s: float) -> Option:
    return Option(
        path=Path.LOCAL,
        prefill=None,
        decode="d",
        source=Source(Kind.ENGINE),
        cached_tokens=0,
        moved_tokens=0,
        items=(("prefill", ttft_s), ("harm", 9.0)),
        tpot_s=0.02,
    )


def decision(chosen_s: float, *others_s: float) -> Decision:
    return Decision(chosen=option(chosen_s), runners_up=tuple(map(option, others_s)))


def timeline(path: Path, **events: float) -> Timeline:
    line = Timeline("r", "", 0.0, path=path.value, output_tokens=11)
    line.events |= events
    return line


def test_each_item_lies_between_the_moments_that_bound_it() -> None:
    seen = actual(
        timeline(
            Path.REMOTE_PREFILL,
            routed=0.1,
            prefill_started=0.3,
            prefill_finished=1.0,
            loaded=1.2,
            first_token=1.5,
            finished=2.5,
        )
    )
    assert dict(seen.items) == pytest.approx({"queue": 0.2, "prefill": 0.7, "transfer": 0.2})
    # D tells nobody when its KV blocks were free.
    assert dict(seen.together) == pytest.approx({("decode_wait", "answer"): 0.3})
    assert [seen.ttft_s, seen.tpot_s] == pytest.approx([1.4, 0.1])
    assert seen.report()["ttft_s"] == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("events", "items"),
    [
        ({}, set()),
        ({"prefill_started": 0.3}, {"queue"}),
        ({"prefill_started": 0.3, "prefill_finished": 1.0, "loaded": 0.8}, {"queue", "prefill", "transfer"}),
        ({"prefill_finished": 1.0, "first_token": 0.9}, {"transfer", "decode_wait answer"}),
    ],
)
def test_what_was_not_seen_is_left_out(events: dict[str, float], items: set[str]) -> None:
    seen = actual(timeline(Path.REMOTE_PREFILL, routed=0.1, **events))
    assert {name for name, _ in seen.items} | {" ".join(names) for names, _ in seen.together} == items


def test_of_a_request_on_one_worker_all_is_seen_as_one() -> None:
    seen = actual(timeline(Path.LOCAL, routed=0.1, prefix_ready=0.2, decode_sent=0.2, first_token=0.6))
    assert dict(seen.items) == pytest.approx({"source": 0.1})
    assert seen.tpot_s is None
    assert dict(seen.together) == pytest.approx({("prefill", "decode_wait", "answer"): 0.4})
    assert seen.report()["together"] == [{"items": ("prefill", "decode_wait", "answer"), "seconds": 0.4}]
    assert "together" not in actual(timeline(Path.LOCAL, routed=0.1)).report()
    assert seen.ttft_s == pytest.approx(0.5)


def test_errors_are_relative_to_what_happened_and_old_ones_are_dropped() -> None:
    seen = Calibration(kept=3)
    assert (seen.error("ttft", 0.5), seen.error("tpot", 0.5)) == (1.0, 1.0)
    for predicted_s in (100.0, 1.0, 1.1, 1.5):
        seen.add(decision(predicted_s), Actual(items=(), ttft_s=1.0, tpot_s=0.04))
    assert [seen.error("ttft", 0.5), seen.error("tpot", 0.9)] == pytest.approx([0.1, 0.5])
    assert repr(seen) == "<Calibration of 4 predictions, ttft off by 0.10>"


@pytest.mark.parametrize(("others_s", "lost_s"), [((), 0.0), ((3.0,), 0.0), ((1.5, 3.0), 0.5)])
def test_regret_is_what_the_best_runner_up_would_have_saved(others_s: tuple[float, ...], lost_s: float) -> None:
    assert regret_s(decision(1.0, *others_s), 2.0) == pytest.approx(lost_s)
    assert regret_s(decision(1.0, *others_s), 1.0) == 0.0


def test_a_request_without_a_first_token_counts_for_nothing() -> None:
    seen = Calibration()
    seen.add(decision(1.0), Actual(items=()))
    assert seen.predictions == 0


@pytest.mark.parametrize("path", list(Path))
def test_a_wait_for_a_prefix_comes_before_the_queue(path: Path) -> None:
    seen = dict(actual(timeline(path, routed=0.1, prefix_ready=0.4, prefill_started=0.6, first_token=1.5)).items)
    assert seen[Item.SOURCE] == pytest.approx(0.3)
    assert seen.get(Item.QUEUE) == (pytest.approx(0.2) if path is Path.REMOTE_PREFILL else None)
