"""Tests of deploy/mock/scheduler.py: steps as vLLM would take them, in times that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvrelay.deploy.mock.kv_cache import KvCache
from kvrelay.deploy.mock.scheduler import Limits, Scheduler, Step
from kvrelay.deploy.mock.sequence import Ending, Sequence
from kvrelay.deploy.mock.timing import Timing
from kvrelay.types import PageName
from tests.deploy.mock.values import AUTHOR, END, PAGE, PERF, FakePages, sequence


@dataclass
class Bench:
    """A scheduler, and its time."""

    blocks: int = 100
    budget: int = 16
    shared: int = 0
    now: float = 0.0
    pages: FakePages = field(default_factory=FakePages)
    stored: list[PageName] = field(default_factory=list)
    written: dict[Sequence, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = KvCache(self.blocks, stored=self.stored.extend, removed=lambda names: None)
        limits = Limits(block_tokens=PAGE, max_batched_tokens=self.budget, shared_chunk_tokens=self.shared)
        self.scheduler = Scheduler(self.cache, Timing(perf=PERF), limits, self.pages, AUTHOR)

    def add(self, *sequences: Sequence) -> None:
        for each in sequences:
            self.scheduler.add(each)

    def step(self) -> dict[Sequence, int]:
        """Take one step: how many tokens of whom it computed."""
        step = self.scheduler.plan(self.now)
        if step is None:
            return {}
        self.now += step.seconds
        self._complete(step)
        return dict(step.parts)

    def _complete(self, step: Step) -> None:
        for each, token in self.scheduler.complete(step, self.now):
            self.written.setdefault(each, []).append(token)
        self.cache.check_invariants()

    def run(self, until: Callable[[], bool], most: int = 1000) -> None:
        """Step until it is so; where nothing can be computed, time passes."""
        for _ in range(most):
            if until():
                return
            if not self.step():
                self.now = max(self.now, self.scheduler.wake_s() or 0.0)
        raise AssertionError("it did not come to it")

    def heard(self, what: str) -> list[int]:
        return [number for said, _, number in self.pages.heard if said == what]


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_then_written_token_by_token() -> None:
    bench, one = Bench(), sequence(40)
    bench.add(one)
    assert [bench.step() for _ in range(6)] == [{one: 16}, {one: 16}, {one: 8}, {one: 1}, {one: 1}, {}]
    assert bench.written[one] == AUTHOR.answer(list(range(1, 41)), 3)
    assert one.ending is Ending.LENGTH
    assert bench.heard("begins") == [16, 32, 40, 41, 42]
    assert bench.heard("ended") == [3]


def test_a_step_takes_what_the_laws_of_prefill_and_of_decode_say() -> None:
    bench, one, two = Bench(), sequence(12), sequence([5] * 10)
    bench.add(one)
    bench.step()
    assert bench.now == pytest.approx(PERF.prefill_s(12))
    before = bench.now
    bench.step()
    assert bench.now - before == pytest.approx(PERF.step_s(1, 12))
    before = bench.now
    bench.add(two)
    assert bench.step() == {one: 1, two: 10}
    each, read = PERF.step.rates[1:]
    assert bench.now - before == pytest.approx(PERF.prefill_s(10) + each + 13 * read), "one start, the longer one"


def test_running_answers_go_on_beside_a_long_prompt() -> None:
    bench = Bench()
    short, long = sequence([2] * 4, max_tokens=9), sequence(100)
    bench.add(short)
    bench.step()
    bench.add(long)
    assert [bench.step()[short] for _ in range(5)] == [1] * 5
    assert long.computed == 5 * 15


def test_a_long_prompt_shares_its_steps_only_when_it_is_not_alone() -> None:
    bench, long, other = Bench(budget=16, shared=6), sequence(100), sequence([9] * 40)
    bench.add(long)
    assert bench.step() == {long: 16}
    bench.add(other)
    assert bench.step() == {long: 6, other: 6}


def test_a_step_that_writes_answers_takes_few_tokens_of_each_prompt() -> None:
    bench = Bench(budget=16, shared=6)
    short, late = sequence([2] * 4, max_tokens=9), sequence(6)
    bench.add(short)
    bench.step()
    bench.add(late)
    assert [bench.step() for _ in range(3)] == [{short: 1, late: 3}, {short: 1, late: 3}, {short: 1, late: 1}]


def test_beside_answers_prompts_are_computed_one_after_another() -> None:
    bench = Bench(budget=16, shared=6)
    writer, one, two = sequence([2] * 4, max_tokens=20), sequence(12, max_tokens=9), sequence([3] * 12, max_tokens=9)
    bench.add(writer)
    bench.step()
    bench.add(one, two)
    assert bench.step() == {writer: 1, one: 3, two: 2}, "who waits comes in"
    assert [bench.step() for _ in range(3)] == [{writer: 1, one: 3}] * 3
    assert bench.step() == {writer: 1, one: 1, two: 3}


@pytest.mark.parametrize("prompts", [1, 2])
def test_who_waits_with_loaded_kv_has_its_token_behind_prompts(prompts: int) -> None:
    bench, loads = Bench(budget=16, shared=6), sequence([5] * 12)
    writer = sequence([2] * 4, max_tokens=20)
    first, *others = [sequence([7 + number] * 60) for number in range(prompts)]
    bench.add(writer)
    bench.step()
    bench.pages.found[loads], bench.pages.load_takes_s = 12, 100.0
    bench.add(loads, first, *others)
    bench.step()
    bench.step()
    assert bench.scheduler.waiting == 1, "beside the steps of the others"
    assert loads not in bench.step()
    bench.now = max(bench.now, bench.scheduler.wake_s() or 0.0)
    assert bench.step() == {writer: 1, first: 3, loads: 1}
    assert bench.scheduler.waiting == 0


def test_loaded_kv_that_nobody_wants_any_more_is_given_back() -> None:
    bench = Bench(budget=4)
    first, loads = sequence([2] * 40), sequence([5] * 12)
    bench.pages.found[loads], bench.pages.load_takes_s = 12, 0.1
    bench.add(loads, first)
    bench.step()
    bench.step()
    bench.scheduler.abort(loads, bench.now)
    assert bench.scheduler.waiting == 0
    bench.run(lambda: first.ending is not None)
    assert bench.cache.used_blocks == 0
    assert not loads.written


def test_an_old_prompt_keeps_its_blocks_when_answers_run_out_of_them() -> None:
    bench = Bench(blocks=14, budget=16, shared=6)
    old, young = sequence(40, max_tokens=1), [sequence([9 + number] * 4, max_tokens=12) for number in range(3)]
    bench.add(old)
    bench.step()
    bench.add(*young)
    computed = 0
    while old.ending is None:
        bench.step()
        assert old.ending or old.computed > computed, "it goes on"
        computed = old.computed
    assert bench.scheduler.totals.preemptions > 0
    bench.run(lambda: all(each.ending for each in young))


def test_where_blocks_may_run_out_prompts_share_and_nobody_is_left_out() -> None:
    bench = Bench(blocks=9, budget=16, shared=6)
    writer, one, two = sequence([2] * 4, max_tokens=9), sequence(12), sequence([3] * 3)
    bench.add(writer)
    bench.step()
    bench.add(one, two)
    assert bench.step() == {writer: 1, one: 3, two: 2}
    assert bench.step() == {writer: 1, one: 1, two: 1}


def test_a_long_prompt_stands_back_for_much_shorter_ones_but_not_for_ever() -> None:
    bench, long = Bench(budget=16, shared=6), sequence(200)
    bench.add(long)
    bench.step()
    for number in range(4):
        short = sequence([9 + number] * 5, max_tokens=1)
        bench.add(short)
        assert bench.step() == {short: 5}
    bench.add(short := sequence([30] * 5, max_tokens=1))
    assert bench.step() == {long: 6, short: 5}
    bench.add(sequence(100))
    assert bench.step()[long] == 6, "which is not much shorter"


def test_what_is_cached_is_not_computed_again_but_for_the_last_token() -> None:
    bench, one, two = Bench(), sequence(16, max_tokens=1), sequence(16, max_tokens=1)
    bench.add(one)
    bench.step()
    bench.add(two)
    assert bench.step() == {two: PAGE}, "a hit ends before the last token, at a whole block"
    assert two.cached_tokens == 12
    assert bench.written[two] == bench.written[one]
    assert (bench.scheduler.totals.local, bench.scheduler.totals.computed) == (12, 20)


def test_pages_are_told_as_their_blocks_fill_those_of_answers_too() -> None:
    bench, one = Bench(), sequence(10, max_tokens=7)
    bench.add(one)
    bench.step()
    assert bench.stored == one.names[:2]
    bench.run(lambda: one.ending is not None)
    assert bench.stored == one.names == one.names[:4]
    assert len(one.tokens) == 17


def test_who_waits_for_its_pages_blocks_nobody_and_loads_them_beside_the_steps_of_others() -> None:
    bench, waits, other = Bench(), sequence(16, max_tokens=1), sequence([7] * 8, max_tokens=4)
    bench.pages.found[waits] = None
    bench.add(waits, other)
    assert bench.step() == {other: 8}
    bench.pages.found[waits] = 16
    bench.pages.load_takes_s = 1.0
    assert bench.step() == {other: 1}
    assert bench.scheduler.wake_s() is not None
    bench.run(lambda: waits.ending is not None)
    assert bench.heard("loaded") == [16]
    assert (waits.cached_tokens, bench.scheduler.totals.loaded, bench.scheduler.totals.computed) == (16, 15, 9)
    assert bench.written[waits] == AUTHOR.answer(list(range(1, 17)), 1)


def test_an_idle_engine_takes_no_step_until_a_load_has_ended() -> None:
    bench, one = Bench(), sequence(16, max_tokens=1)
    bench.pages.found[one] = 16
    bench.add(one)
    assert bench.step() == {}
    assert bench.scheduler.wake_s() == 1.0
    bench.now = 1.0
    assert bench.step() == {one: 1}


def test_a_prompt_without_room_waits_for_it_in_its_turn() -> None:
    bench = Bench(blocks=5, budget=12)
    first, second, third = sequence(12, max_tokens=3), sequence([8] * 12, max_tokens=1), sequence([9] * 4, max_tokens=1)
    bench.add(first, second, third)
    assert bench.step() == {first: 12}
    assert bench.scheduler.waiting == 2, "nobody overtakes whoever waits for room"
    bench.run(lambda: second.ending is not None and third.ending is not None)
    assert bench.cache.used_blocks == 0


def test_an_engine_out_of_blocks_preempts_the_last_one_and_its_answer_is_the_same() -> None:
    bench = Bench(blocks=6)
    sequences = [sequence([number] * 8, max_tokens=12) for number in (1, 2)]
    bench.add(*sequences)
    bench.run(lambda: all(each.ending for each in sequences))
    assert bench.scheduler.totals.preemptions > 0
    assert [bench.written[each] for each in sequences] == [AUTHOR.answer([number] * 8, 12) for number in (1, 2)]
    assert bench.cache.used_blocks == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_aborted_request_gives_everything_back(steps: int) -> None:
    bench, one = Bench(), sequence(20, max_tokens=9)
    bench.add(one)
    for _ in range(steps):
        bench.step()
    bench.scheduler.abort(one, bench.now)
    bench.scheduler.abort(one, bench.now)
    assert bench.cache.used_blocks == bench.scheduler.running == bench.scheduler.waiting == 0
    assert bench.heard("ended") == [one.written]
    assert bench.step() == {}


def test_a_request_that_is_aborted_in_the_middle_of_a_step_gets_no_token_of_it() -> None:
    bench, one, two = Bench(), sequence(8), sequence([3] * 8)
    bench.add(one, two)
    step = bench.scheduler.plan(0.0)
    assert step is not None
    bench.scheduler.abort(one, 0.0)
    assert [each for each, _ in bench.scheduler.complete(step, 1.0)] == [two]


def test_a_load_that_is_aborted_is_forgotten() -> None:
    bench, one = Bench(), sequence(16)
    bench.pages.found[one] = 16
    bench.add(one)
    bench.step()
    bench.scheduler.abort(one, 0.5)
    assert bench.scheduler.wake_s() is None
    assert bench.cache.used_blocks == 0


def test_an_answer_ends_by_itself_where_it_may() -> None:
    prompts = [[number] * 4 for number in range(1, 40)]
    ends = [sequence(prompt, max_tokens=60, ignore_end=False, min_tokens=5) for prompt in prompts]
    bench = Bench(blocks=2000, budget=4000)
    bench.add(*ends)
    bench.run(lambda: all(each.ending for each in ends))
    stopped = [each for each in ends if each.ending is Ending.STOP]
    assert 0 < len(stopped) < len(ends)
    assert all(each.output[-1] == END and each.written > 5 for each in stopped)
