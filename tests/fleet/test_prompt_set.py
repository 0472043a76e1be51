"""Requests of several prompts that one worker computes: all of them are priced, and what they share only once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask
from kvrelay.fleet.pick import Pick
from kvrelay.policy.cost import Item
from tests.fleet.known import PAGE, Told, ask, known_brain, prompt_names

Runs = Sequence[tuple[int, int]]
LONG, SHORT, OTHER = ((1, 40 * PAGE),), ((2, 30 * PAGE),), ((3, 20 * PAGE),)
SHARED = ((1, 30 * PAGE), (4, 2 * PAGE))
"""Begins as ``LONG`` does."""


def asked(*prompts: Runs) -> Ask:
    """One request for all of these."""
    each = [ask("r", *runs).facts for runs in prompts]
    facts = msgspec.structs.replace(
        each[0],
        prompt_tokens=tuple(tokens for facts in each for tokens in facts.prompt_tokens),
        page_names=tuple(names for facts in each for names in facts.page_names),
    )
    return msgspec.structs.replace(ask("r", *prompts[0]), facts=facts, sequences=len(prompts))


def stored(brain: Brain, name: str, *prompts: Runs) -> None:
    """The store ``name`` says that it has these."""
    told, member = Told(brain), brain.fleet.stores.get(name)
    assert member is not None
    for runs in prompts:
        told.has(member.info, prompt_names(*runs), 0.0)


def picked(brain: Brain, request: Ask, way: str) -> Pick:
    chooser = brain._chooser
    pick = chooser.decode(request, (), 0.0) if way == "decode" else chooser.resume(request, (), 0.0)
    assert pick is not None
    return pick


def prefill_s(pick: Pick) -> float:
    return dict(pick.decision.chosen.items)[Item.PREFILL]


WAYS = pytest.mark.parametrize("way", ["decode", "resume"])


@WAYS
def test_all_prompts_of_a_request_are_priced(way: str) -> None:
    brain = known_brain([], [("d0", "s1")])
    all_of_them = picked(brain, asked(SHORT, LONG, OTHER), way)
    assert all_of_them.tokens == 90 * PAGE
    alone_s = [prefill_s(picked(brain, asked(runs), "decode")) for runs in (LONG, SHORT, OTHER)]
    assert prefill_s(all_of_them) == pytest.approx(sum(alone_s), rel=0.2)
    assert all_of_them.decode_reservation(asked(SHORT, LONG, OTHER)).prefill_s == prefill_s(all_of_them)


@WAYS
def test_what_prompts_share_is_priced_once(way: str) -> None:
    brain = known_brain([], [("d0", "s1")])
    assert picked(brain, asked(LONG, SHARED), way).tokens == 42 * PAGE
    assert picked(brain, asked(SHARED, SHARED, LONG), way).tokens == 42 * PAGE


@WAYS
def test_kv_that_is_held_of_all_prompts_is_counted(way: str) -> None:
    brain = known_brain([], [("d0", "s1")])
    request = asked(LONG, SHORT)
    output_tokens = picked(brain, asked(LONG), way).kv_tokens - 40 * PAGE
    assert picked(brain, request, way).kv_tokens >= 70 * PAGE + output_tokens


@WAYS
def test_a_worker_that_has_the_shorter_prompts_is_chosen_and_pays_for_the_rest_alone(way: str) -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s2")])
    stored(brain, "s2", SHORT, OTHER)
    pick = picked(brain, asked(SHORT, LONG, OTHER), way)
    assert pick.decode.name == "d1"
    assert pick.decision.chosen.cached_tokens == 50 * PAGE
    other = next(option for option in pick.decision.runners_up if option.decode == "d0")
    assert other.cached_tokens == 0


def test_what_is_shared_is_not_counted_twice_as_held() -> None:
    brain = known_brain([], [("d0", "s1")])
    stored(brain, "s1", LONG, SHARED)
    assert picked(brain, asked(LONG, SHARED), "decode").decision.chosen.cached_tokens == 42 * PAGE - 1


# ---------------------------------------------------------------- the last page of a prompt is seldom full

TAIL = PAGE // 2 - 1
BRIEF, ODD = ((1, TAIL),), ((1, 30 * PAGE + TAIL),)
OTHER_ODD = ((2, 20 * PAGE + TAIL),)


@WAYS
@pytest.mark.parametrize("runs", [BRIEF, ODD], ids=["less than a page", "pages and a part of one"])
def test_a_prompt_asked_for_several_times_is_priced_once_whatever_its_length(way: str, runs: Runs) -> None:
    brain = known_brain([], [("d0", "s1")])
    tokens = sum(count for _, count in runs)
    assert picked(brain, asked(*[runs] * 8), way).tokens == tokens


def test_no_more_of_a_prompt_is_counted_as_held_than_there_is() -> None:
    brain = known_brain([], [("d0", "s1")])
    stored(brain, "s1", OTHER_ODD)
    assert picked(brain, asked(ODD, OTHER_ODD), "decode").decision.chosen.cached_tokens == 20 * PAGE + TAIL


def test_a_part_of_a_page_that_is_shared_is_not_counted_twice_as_held() -> None:
    brain = known_brain([], [("d0", "s1")])
    stored(brain, "s1", ODD)
    assert picked(brain, asked(ODD, ODD, ODD), "decode").decision.chosen.cached_tokens == 30 * PAGE + TAIL - 1
