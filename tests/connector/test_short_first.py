"""Long prompts stand back for much shorter ones in vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.policy.patience import MAX_HELD_STEPS

pytestmark = pytest.mark.vllm

BUDGET, SHARED, BLOCK = 256, 64, 32


class Bench:
    """The scheduler of an engine without a model: each step computes its tokens in no time, and each answer goes on."""

    def __init__(self, model: Path, blocks: int = 200, *, sequences: int = 128, shared: int = SHARED) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.structured_output import StructuredOutputManager

        from kvrelay.connector.short_first import ShortFirst

        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        cache.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=2048),
            cache_config=cache,
            device_config=DeviceConfig(device="cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=sequences,
                max_num_batched_tokens=BUDGET,
                long_prefill_token_threshold=shared,
                max_model_len=2048,
                is_encoder_decoder=False,
            ),
        )
        self.scheduler = ShortFirst(
            vllm_config=config,
            kv_cache_config=_kv_cache(blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self._ids = iter(range(10**6))

    def add(self, tokens: int, answer: int = 50) -> str:
        request = self._request(tokens, answer)
        self.scheduler.add_request(request)
        return str(request.request_id)

    def hand_over(self, tokens: int, answer: int = 50) -> str:
        """One whose KV is loaded but for the last token: it waits among those that hold blocks."""
        request = self._request(tokens, answer)
        assert self.scheduler.kv_cache_manager.allocate_slots(request, tokens - 1) is not None
        request.num_computed_tokens = tokens - 1
        self.scheduler.add_request(request)
        assert request in self.scheduler.kv_holding_waiting
        return str(request.request_id)

    def _request(self, tokens: int, answer: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name = str(next(self._ids))
        prompt = [7 + int(name)] * tokens
        return Request(name, prompt, SamplingParams(max_tokens=answer, ignore_eos=True), None)

    def step(self) -> dict[str, int]:
        """Tokens of each request that one step computes."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        parts = dict(output.num_scheduled_tokens)
        done = [name for name in parts if not self.scheduler.requests[name].is_prefill_chunk]
        sampled = [[9] if name in done else [] for name in parts]
        index = {name: place for place, name in enumerate(parts)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=list(parts), req_id_to_index=index, sampled_token_ids=sampled)
        )
        return parts

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]


def _kv_cache(blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), TinyShape(max_positions=2048))


def test_a_short_prompt_has_the_next_step_without_the_long_one_and_the_long_one_goes_on_after_it(model: Path) -> None:
    bench = Bench(model)
    long = bench.add(1500)
    assert bench.step() == {long: BUDGET}
    short = bench.add(60)
    assert bench.step() == {short: 60}
    assert bench.running == [long, short], "each in its place"
    assert bench.step() == {long: SHARED // 2, short: 1}


def test_who_writes_an_answer_is_never_held_back(model: Path) -> None:
    bench = Bench(model)
    writer, long = bench.add(40), bench.add(1000)
    bench.step()
    short = bench.add(30)
    assert bench.step() == {writer: 1, short: 30}
    assert bench.running == [writer, long, short]


def test_a_step_that_writes_answers_takes_few_tokens_of_each_prompt(model: Path) -> None:
    bench = Bench(model)
    writer = bench.add(40)
    bench.step()
    late = bench.add(SHARED)
    assert bench.step() == {writer: 1, late: SHARED // 2}
    assert bench.step() == {writer: 1, late: SHARED // 2}
    assert bench.step() == {writer: 1, late: 1}
    assert bench.scheduler.scheduler_config.long_prefill_token_threshold == SHARED


def test_beside_answers_prompts_are_computed_one_after_another(model: Path) -> None:
    bench = Bench(model)
    writer = bench.add(40)
    bench.step()
    one, two = bench.add(80), bench.add(60)
    assert bench.step() == {writer: 1, one: SHARED // 2, two: 2}, "who waits comes in"
    assert bench.step() == {writer: 1, one: SHARED // 2}
    assert bench.step() == {writer: 1, one: 80 - SHARED, two: SHARED // 2 - (80 - SHARED)}
    third = bench.add(10)
    assert bench.step() == {writer: 1, one: 1, third: 10}
    assert bench.running == [writer, one, two, third]
    assert bench.scheduler.max_num_scheduled_tokens == BUDGET


def test_prompts_of_about_the_same_length_share_their_steps(model: Path) -> None:
    bench = Bench(model)
    one, two = bench.add(1000), bench.add(400)
    assert bench.step() == {one: SHARED, two: SHARED}


def test_a_long_prompt_has_a_part_of_every_fifth_step(model: Path) -> None:
    bench = Bench(model)
    long = bench.add(1500)
    bench.step()
    had = []
    for _ in range(2 * (MAX_HELD_STEPS + 1)):
        bench.add(30)
        had.append(long in bench.step())
    assert had == [*[False] * MAX_HELD_STEPS, True] * 2


def test_a_short_prompt_that_finds_no_blocks_does_not_stop_the_long_one(model: Path) -> None:
    bench = Bench(model, blocks=1000 // BLOCK + 2)
    long = bench.add(1000, answer=3)
    while bench.scheduler.requests[long].num_computed_tokens < 900:
        bench.step()
    short = bench.add(20)
    steps = [bench.step() for _ in range(2 * MAX_HELD_STEPS)]
    assert any(long in parts for parts in steps[: MAX_HELD_STEPS + 1])
    assert any(short in parts for parts in steps)


def test_who_waits_with_loaded_kv_is_not_let_in_at_the_place_of_one_who_stands_back(model: Path) -> None:
    bench = Bench(model, sequences=4)
    bench.add(20, answer=12), bench.add(20), bench.add(1500)
    bench.step()
    bench.add(150)
    bench.step()
    handed_over = bench.hand_over(300)
    for _ in range(20):
        bench.step()
        assert len(bench.running) <= 4
    assert handed_over in bench.running, "once a place is free"


@pytest.mark.parametrize("prompts", [1, 2])
def test_who_waits_with_loaded_kv_has_its_token_behind_prompts(model: Path, prompts: int) -> None:
    bench = Bench(model)
    writer = bench.add(40)
    bench.step()
    first, *_ = [bench.add(1000) for _ in range(prompts)]
    bench.step()
    handed_over = bench.hand_over(300)
    assert bench.step() == {writer: 1, first: SHARED // 2, handed_over: 1}


def test_an_old_prompt_keeps_its_blocks_when_answers_run_out_of_them(model: Path) -> None:
    bench = Bench(model, blocks=30)
    old = bench.add(800, answer=2)
    bench.step()
    young = [bench.add(20, answer=90) for _ in range(4)]
    requests = [bench.scheduler.requests[name] for name in (old, *young)]
    while old in bench.scheduler.requests:
        bench.step()
    assert requests[0].num_preemptions == 0
    assert sum(request.num_preemptions for request in requests) > 0


def test_without_a_limit_for_one_prompt_answers_set_none(model: Path) -> None:
    bench = Bench(model, shared=0)
    writer = bench.add(40)
    bench.step()
    long = bench.add(1000)
    assert [bench.step() for _ in range(2)] == [{writer: 1, long: BUDGET - 1}] * 2
