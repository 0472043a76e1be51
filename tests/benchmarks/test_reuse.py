"""Tests of benchmarks/reuse.py: where it takes its traces from, and that no miss is hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reuse


def test_who_has_no_traces_is_told_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("KVRELAY_TRACES", raising=False)
    for arguments in ([], ["--traces", str(tmp_path)], ["--traces", str(tmp_path / "missing"), "lru"]):
        with pytest.raises(SystemExit) as ended:
            reuse.main(arguments)
        assert ended.value.code == 2
        assert reuse.TRACES_FROM in capsys.readouterr().err


def test_traces_are_found_by_the_end_of_their_names(tmp_path: Path) -> None:
    for name in ("mooncake_conversation_trace.jsonl", "synthetic_trace.jsonl", "toolagent_trace.jsonl"):
        (tmp_path / name).touch()
    assert {name: path.name for name, path in reuse.find_traces(tmp_path).items()} == {
        "conversation": "mooncake_conversation_trace.jsonl",
        "synthetic": "synthetic_trace.jsonl",
    }


def test_too_little_reuse_is_shown_as_a_miss() -> None:
    ours = {"as traced": {"conversation": {"reuse": 0.2999}, "synthetic": {"reuse": 0.6205}}}
    table = list(reuse.rows({"routed": ours, "dynosim": {"as traced": {"conversation": {"reuse": 0.289}}}}))
    assert [(row.ours, row.peer, row.met) for row in table] == [("0.2999", "0.2890", False), ("0.6205", "-", True)]
    assert list(reuse.rows({"lru": {}})) == []
