from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from kvrelay import identity, types
from kvrelay.connector.lookup import LEASE_S
from kvrelay.connector.scheduler import SchedulerHalf
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg, handoff_params
from kvrelay.store.client import StoreClient
from kvrelay.types import PageName, Stage
from tests.connector.fakes import BLOCK, ENGINE, PAGE, FakeArena, FakeClient, FakeRequest

WAIT_S = 2.0


class Engine:
    """A scheduler half with a clock of its own."""

    def __init__(
        self,
        engine: types.Engine = ENGINE,
        fill_wait_s: float = 0.0,
        client: FakeClient | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.client = FakeClient() if client is None else client
        self.now = 0.0
        self.half = SchedulerHalf(
            cast(StoreClient, self.client),
            engine,
            owner="w/1",
            load_wait_s=WAIT_S,
            fill_wait_s=fill_wait_s,
            clock=clock or (lambda: self.now),
        )

    def arrive(self, request: FakeRequest) -> FakeRequest:
        self.client.last_tokens = len(request.tokens) % PAGE or PAGE
        self.half.on_new_request(request)
        return request

    def step(self, request: FakeRequest, computed: int, scheduled: int) -> list[tuple[int, int]]:
        """Run a step; the pages it saves as (start, tokens)."""
        blocks = list(range(len(request.tokens) // BLOCK + 2))
        plan = self.half.build_plan([(request, blocks, computed, scheduled)])
        request.num_computed_tokens = computed + scheduled
        return [(page.start, page.tokens) for job in plan.saves for page in job.pages]

    def late(self) -> list[tuple[int, int]]:
        plan = self.half.build_plan([])
        return [(page.start, page.tokens) for job in plan.late_saves for page in job.pages]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def prompt(tokens: int, request_id: str = "r", **fields: Any) -> FakeRequest:
    return FakeRequest(request_id, list(range(tokens)), **fields)


def names_of(request: FakeRequest) -> list[PageName]:
    return identity.name_pages(identity.root_name(ENGINE.fingerprint), request.tokens, PAGE)


# ---------------------------------------------------------------- saving


def test_each_page_is_saved_in_the_step_that_completes_it_and_the_tail_with_the_last(engine: Engine) -> None:
    request = engine.arrive(prompt(100))
    assert engine.half.matched_tokens(request, 0) == 0
    assert engine.step(request, 0, 40) == [(0, 32)]
    assert engine.step(request, 40, 24) == [(32, 32)]
    assert engine.step(request, 64, 36) == [(64, 32), (96, 4)]
    assert engine.step(request, 100, 1) == []


def test_pages_found_in_the_engines_own_cache_are_saved_at_the_first_step(engine: Engine) -> None:
    request = engine.arrive(prompt(100))
    engine.half.allocated(request, [0, 1], 0)
    assert engine.step(request, 64, 36) == [(0, 32), (32, 32), (64, 32), (96, 4)]


def test_pages_that_the_store_has_are_not_saved_again(engine: Engine) -> None:
    request = prompt(100)
    engine.client.here = {names_of(request)[1]}
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.allocated(request, [0, 1], 0)
    assert engine.step(request, 0, 100) == [(0, 32), (64, 32), (96, 4)]


def test_generated_pages_are_saved_as_they_fill(engine: Engine) -> None:
    request = engine.arrive(prompt(30))
    assert engine.step(request, 0, 30) == [(0, 30)]
    for position in range(30, 64):
        request.tokens.append(1000 + position)
        saved = engine.step(request, position, 1)
        assert saved == ([(position + 1 - PAGE, PAGE)] if (position + 1) % PAGE == 0 else [])
    assert [page.name for page in engine.client.announced[1:]] == names_of(request)


def test_a_page_without_a_free_slot_is_saved_later_or_when_the_request_ends(engine: Engine) -> None:
    request = engine.arrive(prompt(100))
    engine.client.slots_left = 1
    assert engine.step(request, 0, 64) == [(0, 32)]
    engine.client.slots_left = 1
    assert engine.step(request, 64, 36) == [(32, 32)]
    engine.client.slots_left = 5
    engine.half.finished(request, [0, 1])
    assert engine.late() == [(64, 32), (96, 4)]
    assert engine.late() == []
    assert {"pages_not_saved_no_slot": 1} in engine.client.reports


def test_a_request_that_ends_before_it_was_scheduled_saves_nothing(engine: Engine) -> None:
    request = engine.arrive(prompt(100))
    engine.half.finished(request, [])
    assert engine.late() == []
    assert engine.client.released == ["w/1/r"]


def test_an_aborted_prefill_saves_only_what_was_computed(engine: Engine) -> None:
    request = engine.arrive(prompt(100))
    engine.client.slots_left = 0
    engine.step(request, 0, 40)
    engine.client.slots_left = 9
    engine.half.finished(request, [0])
    assert engine.late() == [(0, 32)]


def test_without_a_store_nothing_is_planned(engine: Engine) -> None:
    engine.client.arena = None
    request = engine.arrive(prompt(100))
    assert engine.half.matched_tokens(request, 0) == 0
    assert engine.step(request, 0, 100) == []


def test_a_store_that_returns_during_planning_gets_no_page_of_the_old_arena(engine: Engine) -> None:
    request = engine.arrive(prompt(64))
    take_slots = engine.client.take_slots

    def restart_then_take(count: int) -> object:
        engine.client.arena = FakeArena(epoch=8)
        return take_slots(count)

    engine.client.take_slots = restart_then_take  # type: ignore[assignment, method-assign]
    assert engine.step(request, 0, 64) == []
    assert len(engine.client.suspected) == len(engine.client.announced) == 2, "nobody fills them, step or no step"


def test_pages_that_the_worker_half_did_not_fill_are_given_up_after_the_step(engine: Engine) -> None:
    request = engine.arrive(prompt(100))
    engine.step(request, 0, 64)
    assert engine.client.suspected == []
    assert engine.client.arena is not None
    engine.client.arena.whole = False
    engine.step(request, 64, 36)
    assert len(engine.client.suspected) == 2
    engine.client.arena.whole = True
    engine.step(request, 100, 1)
    assert len(engine.client.suspected) == 2


def test_what_an_ended_request_left_is_saved_in_the_very_next_step_or_never(engine: Engine) -> None:
    """Later its blocks hold another request's KV, which would be saved under its names."""
    leg = handoff_params(PrefillLeg(transfer="t", push_to=None))
    request = engine.arrive(prompt(100, kv_transfer_params=leg))
    engine.client.slots_left = 0
    engine.step(request, 0, 100)
    engine.client.slots_left = 9
    engine.half.finished(request, [0, 1])
    arena, engine.client.arena = engine.client.arena, None
    assert engine.late() == []
    assert engine.client.milestones[-1] == ("t", Stage.FAILED)
    engine.client.arena = arena
    assert engine.late() == []


@pytest.mark.parametrize("field", ["lora_request", "prompt_embeds", "pooling_params"])
def test_requests_that_names_do_not_cover_pass_through(engine: Engine, field: str) -> None:
    request = prompt(100)
    setattr(request, field, object())
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) == 0
    assert engine.step(request, 0, 100) == []


def test_salts_separate_tenants(engine: Engine) -> None:
    mine = prompt(64, cache_salt="mine")
    engine.client.here = set(names_of(mine))
    engine.arrive(mine)
    assert engine.half.matched_tokens(mine, 0) == 0


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("tokens", "local", "expected"),
    [(100, 0, 100), (100, 64, 36), (96, 0, 96), (1, 0, 0), (2, 0, 2), (64, 64, 0), (33, 0, 33)],
)
def test_a_prompt_that_the_store_has_is_loaded_to_its_last_token(
    engine: Engine, tokens: int, local: int, expected: int
) -> None:
    request = prompt(tokens)
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    assert engine.half.matched_tokens(request, local) == expected


def test_the_load_ends_at_the_first_missing_page(engine: Engine) -> None:
    request = prompt(100)
    engine.client.here = set(names_of(request)) - {names_of(request)[1]}
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) == 32


def test_asking_twice_changes_nothing(engine: Engine) -> None:
    request = prompt(100)
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    assert [engine.half.matched_tokens(request, 0) for _ in range(3)] == [100, 100, 100]
    assert engine.client.acquired == 1


def test_the_load_gets_the_blocks_and_only_the_pages_it_needs(engine: Engine) -> None:
    request = prompt(100)
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    engine.half.matched_tokens(request, 64)
    engine.half.allocated(request, [4, 5], 36)
    (load,) = engine.half.build_plan([]).loads
    assert (load.begin, load.end, load.blocks) == (64, 100, [4, 5])
    assert [page.start for page in load.pages] == [64, 96]
    assert engine.half.build_plan([]).loads == []


def test_arriving_pages_count_only_with_a_transfer(engine: Engine) -> None:
    plain, split = prompt(100, "plain"), prompt(100, "split", kv_transfer_params=decode_leg("t"))
    engine.client.arriving = set(names_of(plain))
    assert engine.half.matched_tokens(engine.arrive(plain), 0) == 0
    assert engine.half.matched_tokens(engine.arrive(split), 0) == 100


def decode_leg(*transfers: str) -> dict[str, object]:
    return handoff_params(DecodeLeg(transfers=list(transfers)))


def test_a_missing_page_of_a_live_transfer_is_waited_for(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=decode_leg("t"))
    engine.client.live_transfers = {"t"}
    engine.client.arriving = set(names_of(request)[:1])
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) is None
    engine.now += 0.02
    assert engine.half.matched_tokens(request, 0) is None
    engine.client.arriving = set(names_of(request))
    engine.now += 0.02
    assert engine.half.matched_tokens(request, 0) == 100


def test_a_stalled_transfer_is_waited_for_no_longer_than_the_limit(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=decode_leg("t"))
    engine.client.live_transfers = {"t"}
    engine.client.arriving = set(names_of(request)[:1])
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) is None
    engine.now = WAIT_S + 0.1
    assert engine.half.matched_tokens(request, 0) == 32


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_the_limit(engine: Engine) -> None:
    engine.client.answers = False
    request = engine.arrive(prompt(100))
    assert engine.half.matched_tokens(request, 0) is None
    engine.now = WAIT_S + 0.1
    assert engine.half.matched_tokens(request, 0) == 0


@pytest.mark.parametrize("polled_first", [True, False])
def test_an_old_answer_is_asked_again_before_its_pins_lapse(engine: Engine, polled_first: bool) -> None:
    request = engine.arrive(prompt(100))
    if polled_first:
        engine.half.matched_tokens(request, 0)
    engine.now = LEASE_S / 2
    engine.half.matched_tokens(request, 0)
    assert engine.client.acquired == 2


def test_an_answer_from_before_a_long_step_is_not_taken_for_a_stall(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=decode_leg("t"))
    engine.client.live_transfers = {"t"}
    engine.arrive(request)
    engine.client.arriving = set(names_of(request))
    engine.now = 2 * WAIT_S
    assert engine.half.matched_tokens(request, 0) == 100


def test_a_stall_counts_from_the_first_look(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=decode_leg("t"))
    engine.client.live_transfers = {"t"}
    engine.arrive(request)
    engine.now = 2 * WAIT_S
    assert engine.half.matched_tokens(request, 0) is None
    engine.now += WAIT_S + 0.1
    assert engine.half.matched_tokens(request, 0) == 0


def test_no_load_is_announced_while_its_blocks_are_not_free(engine: Engine) -> None:
    request = prompt(200)
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    free = 3
    engine.half.free_blocks = lambda: free
    assert engine.half.matched_tokens(request, 0) is None
    free = 5
    assert engine.half.matched_tokens(request, 0) == 200


def test_a_failed_load_is_not_tried_again_and_what_is_computed_is_saved(engine: Engine) -> None:
    request = prompt(100)
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, [4, 5], 100)
    engine.half.loads_finished(["r"], {5})
    assert engine.half.matched_tokens(request, 0) == 0
    assert engine.step(request, 64, 36) == [(64, 32), (96, 4)]
    assert engine.client.released == ["w/1/r"]


def test_what_one_rank_could_not_load_is_computed_though_another_rank_reports_last(engine: Engine) -> None:
    request = prompt(100)
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, [4, 5], 100)
    engine.half.loads_finished([], {5})
    engine.half.loads_finished(["r"], set())
    assert engine.half.matched_tokens(request, 0) == 0
    assert engine.step(request, 64, 36) == [(64, 32), (96, 4)]


def test_pages_are_announced_with_the_ranks_that_write_them() -> None:
    engine = Engine(msgspec.structs.replace(ENGINE, tensor_parallel=4))
    engine.step(engine.arrive(prompt(64)), 0, 64)
    assert {page.shards for page in engine.client.announced} == {1}, "one KV head has one writer"


def test_a_good_load_is_released_and_nothing_of_it_is_saved_again(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=decode_leg("t"))
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, [4, 5], 100)
    engine.half.loads_finished(["r"], {9})
    assert engine.client.released == ["w/1/r"]
    assert engine.client.milestones == [("t", Stage.LOADED)]
    assert engine.step(request, 99, 1) == []


def test_an_abort_during_a_load_cancels_it_and_saves_nothing(engine: Engine) -> None:
    request = prompt(100)
    engine.client.here = set(names_of(request))
    engine.arrive(request)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, [4, 5], 100)
    request.num_computed_tokens = 100
    engine.half.finished(request, [4, 5])
    plan = engine.half.build_plan([])
    assert plan.cancels == ["r"]
    assert plan.late_saves == []
    engine.half.loads_finished(["r"], set())


def test_a_preempted_request_looks_again_with_its_answer_so_far(engine: Engine) -> None:
    request = prompt(60)
    engine.arrive(request)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, [0, 1], 0)
    request.tokens += range(1000, 1040)
    engine.client.here = set(names_of(request)[:3])
    assert engine.half.matched_tokens(request, 0) == 96


# ---------------------------------------------------------------- transfers


def test_a_prefill_leg_opens_its_transfer_and_tells_its_first_and_last_chunk(engine: Engine) -> None:
    leg = handoff_params(PrefillLeg(transfer="t", push_to="127.0.0.1:9"))
    request = engine.arrive(prompt(100, kv_transfer_params=leg))
    assert engine.client.opened == [("t", 100, "127.0.0.1:9")]
    engine.step(request, 0, 60)
    assert engine.client.milestones == [("t", Stage.STARTED)]
    engine.step(request, 60, 40)
    assert engine.client.milestones == [("t", Stage.STARTED), ("t", Stage.LAST_CHUNK)]
    engine.half.finished(request, [0, 1])
    engine.late()
    assert len(engine.client.milestones) == 2


def test_a_prefill_that_ends_early_fails_its_transfer(engine: Engine) -> None:
    leg = handoff_params(PrefillLeg(transfer="t", push_to=None))
    request = engine.arrive(prompt(100, kv_transfer_params=leg))
    engine.step(request, 0, 60)
    engine.half.finished(request, [0])
    engine.late()
    assert engine.client.milestones[-1] == ("t", Stage.FAILED)


def test_a_prefill_that_never_ran_fails_its_transfer(engine: Engine) -> None:
    leg = handoff_params(PrefillLeg(transfer="t", push_to=None))
    request = engine.arrive(prompt(100, kv_transfer_params=leg))
    engine.half.finished(request, [])
    assert engine.client.milestones == [("t", Stage.FAILED)]


@pytest.mark.parametrize("params", [{"kvrelay": 1}, {"kvrelay": {"type": "x"}}, {"kvrelay": {"transfer": 3}}])
def test_a_hand_off_that_is_not_ours_is_counted_and_ignored(engine: Engine, params: dict[str, object]) -> None:
    request = engine.arrive(prompt(100, kv_transfer_params=params))
    assert engine.half.matched_tokens(request, 0) == 0
    assert {"handoffs_malformed": 1} in engine.client.reports
    assert len(engine.step(request, 0, 100)) == 4


SHORTFALLS = {"unknown": {"handoffs_unheard": 1}, "over": {"handoffs_incomplete": 1}, "all of it came": None}


@pytest.mark.parametrize("transfer", SHORTFALLS)
@pytest.mark.parametrize("pages", [0, 2])
def test_a_hand_off_that_brings_less_than_its_prompt_is_counted_once(engine: Engine, transfer: str, pages: int) -> None:
    request = prompt(100, kv_transfer_params=handoff_params(DecodeLeg(transfers=["t"])))
    names = names_of(request)
    engine.client.here = set(names if transfer == "all of it came" else names[:pages])
    engine.client.live_transfers = {"t"} if transfer == "unknown" else set()
    engine.arrive(request)
    engine.half.matched_tokens(request, 0)
    engine.now = WAIT_S + 0.1
    found = engine.half.matched_tokens(request, 0)
    assert found is not None
    engine.half.allocated(request, [0, 1], found)
    engine.half.allocated(request, [0, 1], 0)
    expected = SHORTFALLS[transfer]
    assert [report for report in engine.client.reports if "handoffs" in str(report)] == ([expected] if expected else [])


def test_pages_that_nobody_promised_are_no_hand_off(engine: Engine) -> None:
    request = engine.arrive(prompt(100))
    assert engine.half.matched_tokens(request, 0) == 0
    engine.half.allocated(request, [0, 1], 0)
    assert engine.client.reports == []


def test_after_a_weight_update_nothing_of_before_is_found_or_saved(engine: Engine) -> None:
    before = engine.arrive(prompt(64))
    engine.half.reset()
    assert engine.step(before, 0, 64) == []
    engine.client.here = set(names_of(before))
    after = engine.arrive(prompt(64, "after"))
    assert engine.half.matched_tokens(after, 0) == 0


def test_what_was_generated_goes_to_the_node_of_the_next_turns_prefill(engine: Engine) -> None:
    params = handoff_params(DecodeLeg(transfers=["t"], home="127.0.0.1:9"))
    request = engine.arrive(prompt(60, kv_transfer_params=params))
    engine.step(request, 0, 60)
    for position in range(60, 100):
        request.tokens.append(1000 + position)
        engine.step(request, position, 1)
    engine.half.finished(request, [0, 1])
    assert engine.late() == []
    assert engine.client.opened == [("r/home", 64, "127.0.0.1:9")]


@pytest.mark.parametrize(("home", "generated"), [(None, 40), ("127.0.0.1:9", 3)])
def test_nothing_goes_home_without_a_home_or_a_generated_page(engine: Engine, home: str | None, generated: int) -> None:
    params = handoff_params(DecodeLeg(transfers=["t"], home=home))
    request = engine.arrive(prompt(60, kv_transfer_params=params))
    engine.step(request, 0, 60)
    for position in range(60, 60 + generated):
        request.tokens.append(1000 + position)
        engine.step(request, position, 1)
    engine.half.finished(request, [0, 1])
    engine.late()
    assert engine.client.opened == []


def test_requests_that_share_a_prefix_write_it_once(engine: Engine) -> None:
    """Both searched before either wrote."""
    first, second = engine.arrive(prompt(100, "first")), engine.arrive(prompt(100, "second"))
    assert len(engine.step(first, 0, 100)) == 4
    assert engine.step(second, 64, 36) == []
    leg = handoff_params(PrefillLeg(transfer="t", push_to=None))
    third = engine.arrive(prompt(100, "third", kv_transfer_params=leg))
    assert engine.step(third, 64, 36) == []
    engine.half.finished(third, [0, 1])
    engine.late()
    assert engine.client.milestones == [("t", Stage.STARTED), ("t", Stage.LAST_CHUNK)]


def test_a_page_of_another_request_that_was_given_up_or_evicted_is_written_again(engine: Engine) -> None:
    first, second = engine.arrive(prompt(96, "first")), engine.arrive(prompt(96, "second"))
    engine.step(first, 0, 96)
    assert engine.client.arena is not None
    engine.client.arena.gone = {engine.client.announced[1].slot}
    assert engine.step(second, 64, 32) == [(32, 32)]


def test_an_evicted_page_is_no_unfilled_one(engine: Engine) -> None:
    request = engine.arrive(prompt(64))
    engine.step(request, 0, 64)
    assert engine.client.arena is not None
    engine.client.arena.whole = False
    engine.client.arena.gone = {page.slot for page in engine.client.announced}
    engine.late()
    assert engine.client.suspected == []


def test_a_page_without_a_slot_is_counted_once(engine: Engine) -> None:
    request = engine.arrive(prompt(96))
    engine.client.slots_left = 0
    for computed in (0, 32, 64):
        engine.step(request, computed, 32)
    engine.half.finished(request, [0, 1])
    engine.late()
    assert sum(report.get("pages_not_saved_no_slot", 0) for report in engine.client.reports) == 3


def test_a_page_of_ones_own_that_could_not_be_loaded_is_written_again(engine: Engine) -> None:
    """The store forgets a damaged page only when it hears of it; until then its slot looks sound."""
    first = engine.arrive(prompt(100, "first"))
    engine.step(first, 0, 100)
    engine.client.here = set(names_of(first))
    second = engine.arrive(prompt(100, "second"))
    engine.half.matched_tokens(second, 0)
    engine.half.allocated(second, [4, 5], 100)
    engine.half.loads_finished(["second"], {5})
    assert engine.step(second, 64, 36) == [(64, 32), (96, 4)]


def test_a_page_whose_tokens_are_not_known_yet_is_planned_once_they_are(engine: Engine) -> None:
    """An engine that schedules ahead counts a token as computed a step before it tells which one it is."""
    request = engine.arrive(prompt(PAGE))
    assert engine.step(request, 0, PAGE) == [(0, PAGE)]
    request.tokens += [9] * (PAGE - 1)
    assert engine.step(request, 2 * PAGE - 1, 1) == []
    request.tokens.append(9)
    assert engine.step(request, 2 * PAGE, 1) == [(PAGE, PAGE)]


def test_a_page_that_a_device_still_copies_is_not_given_up() -> None:
    engine = Engine(fill_wait_s=2.0)
    assert engine.client.arena is not None
    engine.client.arena.whole = False
    engine.step(engine.arrive(prompt(PAGE)), 0, PAGE)
    engine.now = 1.9
    engine.late()
    assert engine.client.suspected == []
    engine.now = 2.0
    engine.late()
    assert len(engine.client.suspected) == 1


# ---------------------------------------------------------------- pages of another KV type


def converting_leg(*dtypes: str) -> dict[str, Any]:
    return handoff_params(DecodeLeg(transfers=["t"], page_dtypes=list(dtypes)))


def names_as(dtype: str, request: FakeRequest, salt: str = "") -> list[PageName]:
    root = identity.root_name(identity.with_dtype(ENGINE.fingerprint, dtype), salt=salt)
    return identity.name_pages(root, request.tokens, PAGE)


def test_pages_of_a_hinted_type_are_loaded_for_conversion_and_nothing_is_saved_under_exact_names(
    engine: Engine,
) -> None:
    request = prompt(100, kv_transfer_params=converting_leg("bfloat16"))
    engine.client.here = set(names_as("bfloat16", request))
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) == 100
    engine.half.allocated(request, [4, 5], 100)
    (job,) = engine.half.build_plan([]).loads
    assert job.format == identity.with_dtype(ENGINE.fingerprint, "bfloat16").format
    engine.half.loads_finished(["r"], set())
    assert sorted(engine.client.released) == ["w/1/r", "w/1/r/bfloat16"]
    request.tokens += range(1000, 1040)
    assert engine.step(request, 99, 41) == []
    engine.half.finished(request, [4, 5, 6])
    assert engine.late() == []


def test_converted_pages_that_the_engine_kept_are_never_saved_under_exact_names(engine: Engine) -> None:
    request = engine.arrive(
        prompt(100, kv_transfer_params=converting_leg("bfloat16"), cache_salt=identity.near_salt("tenant"))
    )
    assert engine.half.matched_tokens(request, 64) == 0
    engine.half.allocated(request, [4, 5], 0)
    assert engine.step(request, 64, 36) == []
    engine.half.finished(request, [4, 5])
    assert engine.late() == []


def test_pages_to_convert_are_named_by_the_tenants_salt(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=converting_leg("bfloat16"), cache_salt=identity.near_salt("tenant"))
    engine.client.here = set(names_as("bfloat16", request, salt="tenant"))
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) == 100


def test_pages_of_the_engines_own_type_are_preferred(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=converting_leg("bfloat16"))
    engine.client.here = set(names_as("bfloat16", request)) | set(names_of(request))
    engine.arrive(request)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, [4, 5], 100)
    (job,) = engine.half.build_plan([]).loads
    assert job.format is None
    assert engine.client.released == ["w/1/r/bfloat16"]


@pytest.mark.parametrize("hint", ["float16", "float8_e4m3fn", "float32", "no type"])
def test_a_hint_that_this_engine_cannot_convert_is_no_search(engine: Engine, hint: str) -> None:
    engine.arrive(prompt(100, kv_transfer_params=converting_leg(hint)))
    assert engine.client.acquired == 1


def test_a_search_waits_for_both_types_and_a_cancelled_load_releases_its_pins(engine: Engine) -> None:
    request = prompt(100, kv_transfer_params=converting_leg("bfloat16"))
    engine.client.live_transfers = {"t"}
    engine.arrive(request)
    assert engine.half.matched_tokens(request, 0) is None
    engine.client.here, engine.client.live_transfers = set(names_as("bfloat16", request)), set()
    engine.now += 0.1
    assert engine.half.matched_tokens(request, 0) == 100
    engine.half.allocated(request, [4, 5], 100)
    engine.half.finished(request, [4, 5])
    assert sorted(engine.client.released) == ["w/1/r", "w/1/r/bfloat16"]
    assert engine.half.build_plan([]).cancels == ["r"]
