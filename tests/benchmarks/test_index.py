"""Tests of benchmarks/index.py: what it says before it measures anything."""

from __future__ import annotations

import pytest

from benchmarks import index


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--no-such-flag", 2)])
def test_nothing_is_measured_for_who_asks_for_help_or_mistypes(
    flag: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index, "measure", lambda chains: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as ended:
        index.main([flag])
    assert ended.value.code == status
    printed = capsys.readouterr()
    assert "--no-peer" in printed.out + printed.err
