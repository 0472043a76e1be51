"""Tests of deploy/progress.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.deploy.progress import READY_MARK, STARTING, LogFollower, milestone

# Lines of a real start of vLLM 0.32.0, shortened.
LOG = """(APIServer pid=1) INFO 11-29 16:03:21 [api_utils.py:286] non-default args: {'host': '127.0.0.1'}
(APIServer pid=1) INFO 11-29 16:03:36 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) INFO 11-29 16:03:45 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=3) INFO 11-29 16:03:54 [cpu_model_runner.py:68] Starting to load model /m...
(Worker pid=3) INFO 11-29 16:03:55 [default_loader.py:501] Loading weights took 0.66 seconds
(EngineCore pid=2) INFO 11-29 16:03:57 [kv_cache_utils.py:2327] CPU KV cache size: 13,568 tokens, Maximum
(EngineCore pid=2) INFO 11-29 16:03:58 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.82 s
(APIServer pid=1) INFO 11-29 16:04:01 [entry.py:140] Starting vLLM server on http://127.0.0.1:21001
"""


def test_every_line_of_a_real_start_is_a_step_further() -> None:
    steps = [milestone(line) for line in LOG.splitlines()]
    fractions = [step.fraction for step in steps if step is not None]
    assert len(fractions) == len(steps)
    assert fractions == sorted(set(fractions))
    assert fractions[-1] < 1


def test_the_size_of_the_kv_cache_is_told() -> None:
    step = milestone(LOG.splitlines()[5])
    assert step is not None
    assert "13,568 tokens" in step.text


@pytest.mark.parametrize("line", ["", "INFO something else", "KV cache"])
def test_other_lines_are_no_step(line: str) -> None:
    assert milestone(line) is None


def test_a_follower_reads_only_what_is_new_and_waits_for_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{READY_MARK} an earlier life\n")
    follower = LogFollower(log)
    assert follower.read() == STARTING
    with log.open("a") as file:
        file.write("Loading weights ")
        file.flush()
        assert follower.read() == STARTING
        file.write("took 1 s\n")
        file.flush()
        assert follower.read().text == "allocating the KV cache"
        file.write(f"Starting to load model m\n{READY_MARK} worker\n")
        file.flush()
        assert follower.read().ready


def test_a_follower_never_goes_back(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    log.write_text("Loading weights took 1 s\nResolved architecture: X\n")
    assert follower.read().text == "allocating the KV cache"


def test_a_log_is_quoted_by_its_errors_the_cause_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    assert follower.errors(3) == []
    log.write_text(
        "INFO config error_handler='raise ValueError: x'\n"
        "(EngineCore pid=2) ERROR 11-29 [core.py:1] AssertionError: sizes differ\n"
        "  File 'x.py', line 3\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
        "error: the engine died\n"
    )
    cause, failed, died = (
        "AssertionError: sizes differ",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "error: the engine died",
    )
    assert follower.errors(3) == [cause, failed, died]
    assert follower.errors(2) == [cause, died]
    log.write_text("pydantic_core._pydantic_core.ValidationError: 1 validation error\nall is well\n")
    assert follower.errors(3) == ["ValidationError: 1 validation error"]


def test_no_error_of_a_former_life_is_quoted_nor_one_before_the_last_mebibyte(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ConnectionResetError: a peer left, ten hours ago\n")
    follower = LogFollower(log)
    with log.open("a") as file:
        file.write("error: long ago\nerror: cannot listen\n")
        file.flush()
        assert follower.errors(3) == ["error: long ago", "error: cannot listen"]
        file.write("all is well\n" * (1 << 17) + "error: the last word\n")
        file.flush()
        assert follower.errors(3) == ["error: the last word"]


def test_a_log_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    log.mkdir()
    assert follower.read() == STARTING
    assert follower.errors(3) == []
