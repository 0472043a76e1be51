"""What ``kvrelay explain`` draws."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from kvrelay.cli.chat import ChatClient
from kvrelay.cli.explain import DESPITE, LOSSES, MANNERS, explanation
from kvrelay.cli.timeline import phases
from kvrelay.errors import Refused
from kvrelay.fleet.actual import actual
from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.admit import Despite
from kvrelay.policy.loss import LossReason
from kvrelay.policy.recover import Manner


def drawn(record: dict[str, Any], width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(explanation(record))
    return [line.rstrip() for line in captured.get().splitlines()]


def option(prefill: str | None, *, total_s: float, queue_s: float = 0.0) -> dict[str, Any]:
    made: dict[str, Any] = {
        "path": "remote_prefill" if prefill else "local",
        "decode_worker": "d1",
        "source": "engine",
        "cached_tokens": 64,
        "cost_s": {"queue": queue_s, "prefill": 0.25, "harm": 0.01},
        "total_s": total_s,
        "ttft_s": 0.3,
        "tpot_s": 0.02,
    }
    return made | ({"prefill_worker": prefill} if prefill else {})


def record(**more: Any) -> dict[str, Any]:
    decision = {"about": "request", **option("p1", total_s=0.31)}
    decision["runners_up"] = [option("p2", total_s=0.51, queue_s=0.2), option(None, total_s=0.9)]
    events = {"received": 0.0, "routed": 0.01, "prefill_sent": 0.011, "prefill_started": 0.02, "finished": 1.0}
    return {
        "request_id": "req-1",
        "path": "remote_prefill",
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "events": events,
        "decision": [decision],
        "actual": {"cost_s": {"queue": 0.009, "prefill": 0.24}, "ttft_s": 0.28},
        **more,
    }


async def test_every_replica_behind_the_port_is_asked() -> None:
    """Who has the connection answers all of it, as a router does; the next one is another's."""
    asked = Counter[object]()

    async def timeline(http: web.Request) -> web.Response:
        asked[http.transport] += 1
        knows = len(asked) == 4
        error = {"error": {"message": "no such request"}}
        return web.json_response(record() if knows else error, status=200 if knows else 404)

    app = web.Application()
    app.router.add_get("/kvrelay/requests/req-1", timeline)
    async with TestServer(app) as server, ChatClient(str(server.make_url("/"))) as client:
        assert (await client.timeline("req-1"))["decode_worker"] == "d1"
        assert list(asked.values()) == [1] * 4
        with pytest.raises(Refused, match="no such request"):
            await client.timeline("req-1")
    assert set(asked.values()) == {1}


def row(lines: list[str], name: str) -> list[str]:
    (found,) = [line for line in lines if line.strip().startswith(f"{name}  ")]
    return found.split(name, 1)[1].split()


def test_predicted_actual_and_the_runners_up_stand_side_by_side() -> None:
    lines = drawn(record())
    assert "chosen: p1 > d1; 64 tokens expected cached (engine)" in lines
    (head,) = [line for line in lines if line.strip().startswith("ms ")]
    assert head.split() == ["ms", "predicted", "actual", "or", "p2", ">", "d1", "d1", "alone"]
    assert row(lines, "wait at P") == ["0.0", "9.0", "200.0", "0.0"]
    assert row(lines, "prefill") == ["250.0", "240.0", "250.0", "250.0"]
    assert row(lines, "time to first token") == ["300.0", "280.0", "300.0", "300.0"]
    assert row(lines, "cost") == ["310.0", "510.0", "900.0"]
    assert not [line for line in lines if "price of KV" in line]


def test_the_bar_and_the_actual_seconds_agree_and_say_what_they_count_from() -> None:
    timeline = Timeline("req-1", "", 0.0, path="remote_prefill", prefill_worker="p1", decode_worker="d1")
    moments = {"routed": 12.5, "prefill_sent": 16.0, "prefill_started": 24.0, "prefill_finished": 40.0, "loaded": 41.0}
    for name, moment_ms in (moments | {"first_token": 51.0, "finished": 90.0}).items():
        timeline.mark(name, moment_ms / 1e3)
    told = timeline.report() | {"actual": actual(timeline).report(), "decision": record()["decision"]}
    spans = {part.name: 1e3 * part.seconds for part in phases(told)}
    lines = drawn(told)
    assert row(lines, "wait at P")[1] == f"{spans['queue']:.1f}" == "11.5"
    assert row(lines, "prefill")[1] == f"{spans['prefill']:.1f}"
    assert row(lines, "time to first token")[1] == "38.5"
    assert "Counted from this choice on, 12.5 ms after the request was received." in lines


def test_items_that_were_seen_as_one_share_a_number() -> None:
    decision = {"about": "request", **option("p1", total_s=0.31), "runners_up": []}
    decision["cost_s"] |= {"decode_wait": 0.001, "answer": 0.02}
    seen = {"cost_s": {"prefill": 0.24}, "together": [{"items": ["decode_wait", "answer"], "seconds": 0.025}]}
    lines = drawn(record(decision=[decision], actual=seen))
    assert row(lines, "prefill")[:2] == ["250.0", "240.0"]
    assert row(lines, "wait at D") == ["1.0", "↓"]
    assert row(lines, "first token") == ["20.0", "25.0"]
    assert "↓ seen together with the next row that has a number" in lines


def test_it_fits_eighty_columns() -> None:
    assert max(map(len, drawn(record(), 80))) <= 80


def test_it_says_why_a_request_was_not_split_and_that_there_were_more_choices() -> None:
    decision = {"about": "request", **option(None, total_s=0.3), "runners_up": []}
    lines = drawn(record(path="local", local_reason="cheaper", decision=[decision, decision]))
    assert "chosen: d1 alone, not split (cheaper); 64 tokens expected cached (engine)" in lines
    assert any("1 more choices" in line for line in lines)


def test_it_says_what_is_only_a_guess() -> None:
    decision = {"about": "request", **option("p1", total_s=0.3), "guesses": ["prefill", "tpot"]}
    assert any("Not learned yet: prefill, time per token." in line for line in drawn(record(decision=[decision])))
    assert not any("Not learned yet" in line for line in drawn(record()))


def test_it_says_what_was_promised_and_why_it_was_let_in_all_the_same() -> None:
    lines = drawn(record(promise={"ttft_s": 0.005, "tpot_s": 0.02, "despite": "trial"}), width=140)
    assert "Promised: first token within 5.0 ms, time per token 20.0 ms." in lines
    assert any("let in all the same: it was alone" in line for line in lines)
    kept = drawn(record(promise={"ttft_s": 5.0}))
    assert "Promised: first token within 5,000.0 ms." in kept
    assert not any("let in" in line for line in kept)
    assert not any("Promised" in line for line in drawn(record()))
    assert set(DESPITE) == set(Despite)


def unstarted(**more: Any) -> dict[str, Any]:
    events = {"received": 0.0, "tokenised": 0.1, "finished": 0.5}
    return {"request_id": "req-1", "path": "none", "events": events, **more}


def test_a_request_that_was_turned_away_before_anything_was_chosen_has_no_table() -> None:
    lines = drawn(unstarted(refusal="no worker is ready; retry"))
    assert lines[-1] == "It was turned away: no worker is ready; retry."
    assert "░░ admission 400.0 ms it was not let in" in lines


def test_what_was_predicted_of_a_request_that_was_turned_away_is_shown_with_the_reason() -> None:
    decision = record()["decision"]
    lines = drawn(unstarted(refusal="the first token is predicted after 0.3 s", decision=decision))
    assert "It was turned away: the first token is predicted after 0.3 s." in lines
    assert "The best way was p1 > d1" in lines
    assert row(lines, "time to first token") == ["300.0"] * 3, "and of the next best ways"
    assert "Its client left before it was let in." in drawn(unstarted(decision=decision))


def test_every_lost_decode_worker_is_a_sentence() -> None:
    loss = {"reason": "silent", "lost_worker": "d1", "tokens": 31, "manner": "continue", "outcome": "failed"}
    went_on = {**loss, "outcome": "resumed", "worker": "d2", "pause_s": 1.61, "cached_tokens": 96}
    lines = drawn(record(resumptions=[went_on, loss]), width=140)
    assert (
        "d1 stood still after 31 tokens (silent); d2 went on after a pause of 1,610.0 ms, with 96 tokens from caches "
        "(from what was written)"
    ) in lines
    assert "d1 stood still after 31 tokens (silent); nobody went on" in lines


def test_every_reason_of_a_loss_and_every_manner_has_its_words() -> None:
    assert set(LOSSES) == set(LossReason)
    assert set(MANNERS) == set(Manner) - {Manner.FAIL}
    unasked = {"reason": "unasked", "lost_worker": "d1", "tokens": 0, "manner": "restart", "outcome": "failed"}
    told = "d1 could not be reached or took no request after 0 tokens (unasked); nobody went on"
    assert told in drawn(record(resumptions=[unasked]))


def test_a_refused_prompt_was_not_read_and_its_guessed_length_is_called_so() -> None:
    refused = record(
        path="local", local_reason="over_length", prompt_tokens=600_001, status=400, failure="it is over the length"
    )
    lines = drawn(refused, width=140)
    assert "Answered 400: it is over the length" in lines
    assert any("about 600001 tokens sent to d1" in line for line in lines)
    assert not any("tokens read" in line for line in lines)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ({"status": 499}, "Its client went away before the end"),
        ({"status": 503}, "Answered 503"),
        (
            {"status": 502, "events": {"received": 0.0, "first_token": 0.5, "finished": 1.0}},
            "Its answer broke off (502)",
        ),
    ],
)
def test_how_a_request_failed_is_told(ending: dict[str, Any], told: str) -> None:
    assert told in drawn(record(**ending))
    assert told not in drawn(record(status=200))
