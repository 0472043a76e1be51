"""Tests of benchmarks/handoff.py: what it says before, and when it is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import handoff


def test_the_plan_names_the_stages_their_time_and_the_file() -> None:
    text = handoff.plan(["ours", "arena"], handoff.FULL, Path("there.json"))
    assert "about 7 min in all" in text
    assert "there.json" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == ["ours", "arena"]


def test_help_explains_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        handoff.main(["--help"])
    text = capsys.readouterr().out
    assert [name for name, stage in handoff.STAGES.items() if f"  {name} " not in text or stage.what not in text] == []


def test_an_interrupted_run_says_where_the_ended_stages_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def interrupted(_size: object, _say: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    results = tmp_path / "results.json"
    monkeypatch.setattr(handoff, "RESULTS", results)
    monkeypatch.setitem(handoff.STAGES, "arena", handoff.Stage(interrupted, 1, "nothing"))
    with pytest.raises(SystemExit) as ended:
        handoff.main(["arena"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"interrupted; stages that ended are in {results}\n"
