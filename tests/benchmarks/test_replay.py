"""Tests of benchmarks/replay: that requests go to who holds their prefix, and that figures are counted as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.replay.engine import TracedEngine, worker
from benchmarks.replay.fleet import Outcome, TracedFleet
from benchmarks.replay.front import Front, RoundRobin, Routed
from benchmarks.replay.trace import BLOCK_TOKENS, TracedRequest, spread_s, traced_s

SESSIONS, TURNS, TURN_BLOCKS, REST_TOKENS = 40, 5, 4, 100


def sessions(*, shared_blocks: int = 0, gap_s: float = 1.0) -> list[TracedRequest]:
    """Conversations side by side, whose prompts grow with each turn; all begin with the same ``shared_blocks``."""
    requests: list[TracedRequest] = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            own = [1_000 * (session + 1) + block for block in range(TURN_BLOCKS * (turn + 1))]
            ids = [*range(shared_blocks), *own]
            requests.append(
                TracedRequest(
                    input_length=len(ids) * BLOCK_TOKENS + REST_TOKENS,
                    hash_ids=[*ids, 1_000_000 + len(requests)],
                    timestamp=1e3 * gap_s * len(requests),
                    output_length=20,
                )
            )
    return requests


def in_turn(engines: Sequence[TracedEngine]) -> Front:
    return RoundRobin([engine.info for engine in engines])


def outcome(
    trace: Sequence[TracedRequest], front: Callable[[Sequence[TracedEngine]], Front], *, workers: int, blocks: int
) -> Outcome:
    engines = [TracedEngine(worker(f"w{number}", blocks)) for number in range(workers)]
    return TracedFleet(engines, front(engines)).replay(trace, traced_s(trace))


def most(trace: Sequence[TracedRequest], *, shared_blocks: int = 0) -> float:
    """What caches without a limit would find again, if every turn went where the one before it did."""
    before = [max(0, request.input_length // BLOCK_TOKENS - TURN_BLOCKS - shared_blocks) for request in trace]
    return BLOCK_TOKENS * sum(before) / sum(request.input_length for request in trace)


def test_every_turn_of_a_conversation_goes_where_the_one_before_it_was() -> None:
    trace = sessions()
    routed, turns = (outcome(trace, front, workers=3, blocks=400) for front in (Routed, in_turn))
    assert routed.reuse == pytest.approx(most(trace), rel=0.02)
    assert turns.reuse < 0.5 * routed.reuse


def test_caches_hold_more_together_when_conversations_stay() -> None:
    """All conversations fill 840 blocks: three caches of 300 have room for them only if each is in one of them."""
    trace = sessions()
    routed = outcome(trace, Routed, workers=3, blocks=300)
    assert routed.reuse > 0.9 * most(trace)
    assert max(routed.by_engine) < 1.2 * len(trace) / 3


def test_a_prefix_that_all_share_does_not_draw_all_to_one_worker() -> None:
    trace = sessions(shared_blocks=8, gap_s=0.04)
    routed = outcome(trace, Routed, workers=3, blocks=400)
    assert max(routed.by_engine) < 1.3 * len(trace) / 3
    assert routed.reuse > most(trace, shared_blocks=8)


def test_what_is_found_again_is_counted_by_hand() -> None:
    trace = [
        TracedRequest(1_100, [1, 2, 3], 0.0, 2),  # two full blocks; a part of one is never found again
        TracedRequest(1_100, [1, 2, 3], 9e3, 2),  # the other worker's turn
        TracedRequest(1_024, [1, 2], 18e3, 2),  # the last token is computed, and so is its block
        TracedRequest(1_600, [1, 2, 4, 5], 27e3, 2),
    ]
    turns = outcome(trace, in_turn, workers=2, blocks=10)
    assert (turns.reused_tokens, turns.input_tokens) == (512 + 1_024, 1_100 + 1_100 + 1_024 + 1_600)
    assert (turns.by_engine, turns.refused, len(turns.ttft_s)) == ([2, 2], 0, 4)


@pytest.mark.slow
def test_the_same_trace_gives_the_same_figures() -> None:
    trace = sessions(gap_s=0.2)
    first, second = (outcome(trace, Routed, workers=3, blocks=300) for _ in range(2))
    assert first == second


def test_requests_of_one_tick_are_spread_until_the_next() -> None:
    trace = [TracedRequest(1, [1], at) for at in (0, 0, 0, 3_000, 3_000, 6_000, 6_000)]
    assert spread_s(trace) == [0.0, 1.0, 2.0, 3.0, 4.5, 6.0, 6.0]
    assert traced_s(trace) == [0.0, 0.0, 0.0, 3.0, 3.0, 6.0, 6.0]
