"""Predictions of prefill and decode against laws and measurements that others published."""

from __future__ import annotations

import csv
import json
import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvrelay.policy.hardware import DEVICES, UNKNOWN_DEVICE, ModelShape, hardware_of, shape_of
from kvrelay.policy.perf import Perf, prefill_seconds, seed, step_seconds
from kvrelay.types import PageFormat

TRACES = Path(os.environ.get("KVRELAY_TRACES", "/nowhere"))
LLAMA_8B = ModelShape(
    parameters=8_030_000_000, layers=32, hidden=4096, kv_token_bytes=128 << 10, weight_bytes=16_060_000_000
)
OPT_13B = ModelShape(
    parameters=12_850_000_000, layers=40, hidden=5120, kv_token_bytes=800 << 10, weight_bytes=25_700_000_000
)
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="set KVRELAY_TRACES to the folder of public traces")


def test_a_longer_prompt_takes_longer_and_a_cached_one_less() -> None:
    perf = seed(LLAMA_8B, DEVICES["H100"])
    assert perf.prefill_s(8000) > 2 * perf.prefill_s(4000) > 0
    assert perf.prefill_s(1000, 7000) < perf.prefill_s(8000) / 4
    assert perf.step_s(64, 64_000) > perf.step_s(1, 1000)


def test_the_seed_is_of_the_right_order() -> None:
    perf = seed(LLAMA_8B, DEVICES["H100"])
    assert 0.1 < perf.prefill_s(4000) < 0.3  # about 25k tokens/s on one H100
    assert 0.006 < perf.step_s(1, 1000) < 0.02


@pytest.mark.parametrize(
    ("device", "peaks"),
    [("NVIDIA H200", DEVICES["H200"]), ("NVIDIA A100-SXM4-80GB", DEVICES["A100"]), ("toaster", UNKNOWN_DEVICE)],
)
def test_devices_are_known_by_what_they_call_themselves(device: str, peaks: object) -> None:
    assert hardware_of(device) == peaks


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "parameters"), [(30, 3, 64, 135e6), (32, 8, 128, 8e9), (64, 8, 128, 32e9)]
)
def test_the_shape_of_a_page_tells_the_size_of_a_model_roughly(
    layers: int, kv_heads: int, head_dim: int, parameters: float
) -> None:
    page = PageFormat(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16", page_tokens=32)
    assert parameters / 3 < shape_of(page).parameters < parameters * 3


@pytest.mark.parametrize(("new", "past"), [(100, 0), (4000, 2000)])
def test_the_short_form_says_the_same(new: int, past: int) -> None:
    perf = seed(LLAMA_8B, DEVICES["H100"])
    assert prefill_seconds(perf.prefill.rates, new, past) == pytest.approx(perf.prefill_s(new, past))
    assert step_seconds(perf.step.rates, new, past) == pytest.approx(perf.step_s(new, past))


def test_an_heir_believes_what_was_learned_and_claims_to_have_seen_nothing() -> None:
    perf = seed(LLAMA_8B, DEVICES["cpu"])
    for _ in range(20):
        perf = perf.saw_prefill(1000, 0, 0.5).saw_step(4, 4000, 0.02).saw_answer(0.03)
    heir = perf.heir()
    assert heir.prefill_s(1000) == pytest.approx(perf.prefill_s(1000))
    assert (heir.prefill.seen, heir.prefill.error()) == (0, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(perf), type=Perf) == perf


# ---------------------------------------------------------------- what others measured


def distserve() -> Iterator[tuple[str, dict[str, list[float]]]]:
    for path in sorted((TRACES / "distserve").glob("*.json")):
        for model, by_tensor_parallel in json.loads(path.read_text()).items():
            for degree, laws in by_tensor_parallel.items():
                yield f"{path.stem} {model} tp{degree}", laws


@needs_traces
def test_distserves_prefills_are_learned_from_a_foreign_seed() -> None:
    chance = random.Random(1)
    for name, laws in distserve():
        start_ms, token_ms, pair_ms = laws["prefill"]
        perf = seed(OPT_13B, DEVICES["A100"])
        for _ in range(100):
            tokens = chance.randint(16, 2048)
            seen_s = (start_ms + token_ms * tokens + pair_ms * tokens**2) / 1e3
            perf = perf.saw_prefill(tokens, 0, seen_s * chance.lognormvariate(0, 0.03))
        for tokens in (64, 512, 2000):
            truth_s = (start_ms + token_ms * tokens + pair_ms * tokens**2) / 1e3
            assert perf.prefill_s(tokens) == pytest.approx(truth_s, rel=0.1), name
        assert perf.prefill.error(0.5) < 0.05, name


def splitwise() -> dict[tuple[str, str, str], list[dict[str, float]]]:
    """Rows by model, hardware and tensor parallelism."""
    groups: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    columns = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
    with (TRACES / "splitwise_perf_model.csv").open() as lines:
        for row in csv.DictReader(lines):
            key = (row["model"], row["hardware"], row["tensor_parallel"])
            groups.setdefault(key, []).append({column: float(row[column]) for column in columns})
    return groups


def predicted_before_seen(rows: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Relative errors of prefills and of steps, each predicted before it was learned; the first twenty left out."""
    perf, chance = seed(LLAMA_8B, DEVICES["A100"]), random.Random(7)
    rows = rows * 3
    chance.shuffle(rows)
    for row in rows:
        tokens = row["prompt_size"] * row["batch_size"]
        # A batch of prompts is a longer prefill without attention between its prompts.
        past = row["prompt_size"] / 2 - tokens / 2
        perf = perf.saw_prefill(tokens, past, row["prompt_time"] / 1e3)
        kv_tokens = row["batch_size"] * (row["prompt_size"] + row["token_size"] / 2)
        perf = perf.saw_step(row["batch_size"], kv_tokens, row["token_time"] / 1e3)
    return [abs(error) for error in perf.prefill.errors[20:]], [abs(error) for error in perf.step.errors[20:]]


@needs_traces
def test_splitwises_measurements_are_predicted() -> None:
    groups = {key: rows for key, rows in splitwise().items() if len(rows) >= 60}
    assert groups
    for key, rows in groups.items():
        prefills, steps = predicted_before_seen(rows)
        assert statistics.median(prefills) < 0.2, key
        assert statistics.median(steps) < 0.2, key
