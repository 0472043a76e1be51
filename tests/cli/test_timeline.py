"""Tests of cli/timeline.py."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from typing import Any, Literal

import pytest
from rich.console import Console

from kvrelay.cli.timeline import BAR_CELLS, cells, draw, is_guessed, phases
from kvrelay.policy.whole import WholeReason

SPLIT: dict[str, Any] = {
    "request_id": "req-1",
    "path": "remote_prefill",
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-0",
    "prompt_tokens": 311,
    "cached_tokens": 32,
    "output_tokens": 60,
    "status": 200,
    "events": {
        "received": 0.0,
        "tokenised": 0.002,
        "routed": 0.003,
        "prefill_sent": 0.004,
        "prefill_started": 0.020,
        "last_chunk": 0.021,
        "decode_sent": 0.024,
        "arrived": 0.715,
        "prefill_finished": 0.720,
        "loaded": 0.735,
        "first_token": 0.780,
        "finished": 2.900,
    },
    "transfer": {"bytes": 7_165_440, "seconds": 0.6, "loaded_tokens": 310, "hidden_s": 0.69, "exposed_s": 0.015},
}
LOCAL: dict[str, Any] = {
    **SPLIT,
    "path": "local",
    "prefill_worker": None,
    "events": {"received": 0.0, "decode_sent": 0.01, "first_token": 0.5, "finished": 1.0},
    "transfer": None,
}


def drawn(record: dict[str, Any], *, colour: bool = False) -> str:
    output = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    Console(width=80, file=output, force_terminal=colour, color_system=system).print(draw(record))
    return output.getvalue()


def test_phases_follow_each_other_without_a_gap_and_sum_to_the_whole() -> None:
    parts = phases(SPLIT)
    assert [part.name for part in parts] == [
        "route",
        "queue",
        "prefill",
        "transfer, exposed",
        "first token",
        "decode",
    ]
    assert all(before.end_s == after.start_s for before, after in pairwise(parts))
    assert sum(part.seconds for part in parts) == pytest.approx(2.9)
    assert parts[3].seconds == pytest.approx(0.015)


def test_a_transfer_that_the_prefill_hides_takes_no_time_of_its_own() -> None:
    record = {**SPLIT, "events": {**SPLIT["events"], "loaded": 0.7}}
    parts = {part.name: part for part in phases(record)}
    assert parts["transfer, exposed"].seconds == 0
    assert parts["first token"].start_s == pytest.approx(0.72)


def test_a_first_token_that_overtakes_the_prefills_answer_ends_the_prefill() -> None:
    events = {**SPLIT["events"], "prefill_finished": 0.8, "loaded": 0.76}
    record = {**SPLIT, "events": events, "transfer": {**SPLIT["transfer"], "hidden_s": 0.74}}
    parts = phases(record)
    assert [part.name for part in parts] == ["route", "queue", "prefill", "decode"]
    assert (parts[2].end_s, parts[3].start_s) == (0.78, 0.78)
    text = " ".join(drawn(record).split())
    assert "it ends with D's first token" in text
    assert "for 740.0 ms layers" in text


def test_a_load_that_is_heard_of_after_the_first_token_takes_no_time_of_its_own() -> None:
    parts = {part.name: part for part in phases({**SPLIT, "events": {**SPLIT["events"], "loaded": 0.9}})}
    assert "transfer, exposed" not in parts
    assert (parts["first token"].start_s, parts["first token"].end_s) == (0.72, 0.78)


@pytest.mark.parametrize(
    ("loaded", "text"),
    [
        (311, "loaded the prompt, computed its end"),
        (310, "loaded the prompt, computed its end"),
        (96, "loaded 96 of 311 tokens; it had or computed the others"),
        (0, "loaded nothing: it had the tokens or computed them"),
    ],
)
def test_what_the_decode_worker_loaded_is_told_as_far_as_it_is_known(loaded: int, text: str) -> None:
    record = {**SPLIT, "transfer": {**SPLIT["transfer"], "loaded_tokens": loaded}}
    assert f"decode-0 {text}" in " ".join(drawn(record).split())


def test_the_times_that_are_shown_add_up_to_the_total() -> None:
    moments = {name: moment + index * 0.00004 for index, (name, moment) in enumerate(SPLIT["events"].items())}
    shown = [
        float(row[1].replace(",", ""))
        for row in re.findall(r"^(\S\S|  ) .*? ([\d,]+\.\d) ms", drawn({**SPLIT, "events": moments}), re.MULTILINE)
        if row[0] != "--"
    ]
    assert len(shown) == 7
    assert sum(shown[:-1]) == pytest.approx(shown[-1])


def test_an_answer_that_did_not_stream_is_read_and_written_in_one_phase() -> None:
    events = {"received": 0.0, "decode_sent": 0.01, "finished": 1.0}
    assert [part.name for part in phases({**LOCAL, "events": events})] == ["route", "prefill and decode"]


def test_a_local_prefill_has_no_transfer() -> None:
    assert [part.name for part in phases(LOCAL)] == ["route", "prefill", "decode"]
    assert "transfer" not in drawn(LOCAL)


def test_events_that_were_not_seen_leave_their_phase_out() -> None:
    events = {name: moment for name, moment in SPLIT["events"].items() if name not in ("prefill_started", "loaded")}
    assert [part.name for part in phases({**SPLIT, "events": events})] == ["route", "prefill", "first token", "decode"]


@pytest.mark.parametrize("width", [8, 20, BAR_CELLS])
def test_the_bar_fills_its_width_and_shows_the_shortest_phase(width: int) -> None:
    given = cells(phases(SPLIT), width)
    assert sum(given) == width
    assert min(given) >= 1
    assert given.index(max(given)) == 5


def test_the_picture_fits_80_columns_and_is_readable_without_colour() -> None:
    text = drawn(SPLIT)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    bar = lines[1]
    assert [bar.count(glyph) > 0 for glyph in "·░█▒▓="] == [True] * 6
    assert "\x1b" not in text
    for word in (
        "prefill 700.0 ms",
        "311 tokens on prefill-0, 32 of them cached",
        "for 690.0 ms layers were handed over (7.2 MB over the wire) while the prompt was computed",
        "decode-0 loaded the prompt, computed its end",
        "total 2,900.0 ms",
        "60 tokens on decode-0",
    ):
        assert word in " ".join(text.split())


def test_what_nobody_was_told_of_caches_is_not_claimed() -> None:
    text = " ".join(drawn({**SPLIT, "cached_tokens": None}).split())
    assert "311 tokens on prefill-0" in text
    assert "cached" not in text


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        ({"bytes": 0, "late_bytes": 0, "transport": "local"}, "(in shared memory) while the prompt was computed"),
        (
            {"transport": "tcp", "gb_per_s": 1.249, "late_bytes": 71_654},
            "(7.2 MB over tcp at 1.2 GB/s) while the prompt was computed; 1.0% of the bytes came after it",
        ),
        ({"transport": "tcp", "gb_per_s": 192.4, "late_bytes": 0}, "(7.2 MB over tcp at 190 GB/s)"),
        ({"transport": "tcp", "late_bytes": 0}, "(7.2 MB over tcp) while the prompt was computed; 0.0% of"),
    ],
)
def test_how_the_pages_came_is_told(moved: dict[str, Any], text: str) -> None:
    record = {**SPLIT, "transfer": {**SPLIT["transfer"], **moved}}
    told = " ".join(drawn(record).split())
    assert text in told
    assert ("came after it" in told) == (record["transfer"]["bytes"] > 0)


def test_the_hand_off_is_drawn_below_the_prefill_that_hides_it() -> None:
    bar, row = drawn(SPLIT).splitlines()[1:3]
    assert row.index("-") == bar.index("█")
    assert row.rindex("-") == bar.rindex("█")
    assert row.index("▒") == bar.index("▒")


def test_colour_is_used_where_there_is_some() -> None:
    assert "\x1b[34m" in drawn(SPLIT, colour=True)


@pytest.mark.parametrize("record", [{}, {"events": {"received": 0.0}}, {"events": {}, "path": "remote_prefill"}])
def test_a_request_that_got_nowhere_is_drawn_without_a_bar(record: dict[str, Any]) -> None:
    assert "0 ms" in drawn(record)


@pytest.mark.parametrize(
    ("wait", "note"),
    [
        ({"source": "underway", "tokens": 256, "ending": "came"}, "256 tokens that another request computed: came"),
        ({"source": "peer", "origin": "store-1", "tokens": 256, "ending": "lost"}, "256 tokens from store-1: lost"),
    ],
)
def test_a_wait_for_a_prefix_is_a_phase_of_its_own(wait: dict[str, Any], note: str) -> None:
    events = {**SPLIT["events"], "prefix_ready": 0.010, "prefill_sent": 0.011}
    held = {**SPLIT, "events": events, "waits": [wait]}
    names = [part.name for part in phases(held)]
    assert names[:4] == ["route", "wait for prefix", "queue", "prefill"]
    assert phases(held)[1].seconds == pytest.approx(0.007)
    assert note in drawn(held)
    local = {**LOCAL, "events": {**LOCAL["events"], "routed": 0.005, "prefix_ready": 0.1}, "waits": [wait]}
    assert [part.name for part in phases(local)] == ["route", "wait for prefix", "prefill", "decode"]


@pytest.mark.parametrize("reason", [*WholeReason, "cheaper", "no_pair", None])
def test_the_length_of_a_prompt_that_nobody_read_is_called_a_guess(reason: str | None) -> None:
    assert is_guessed({"local_reason": reason}) is isinstance(reason, WholeReason)
