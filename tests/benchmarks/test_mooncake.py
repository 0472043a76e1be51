"""Tests of benchmarks/peers/mooncake.py: where it cannot run, the reason stands where its figures would."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.peers import mooncake
from benchmarks.routers import enclosure


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process: a machine that can run it."""
    monkeypatch.setattr(mooncake, "DEBIAN_PACKAGES", {"libc.so.6": "libc6"})
    monkeypatch.setattr(enclosure, "why_not", lambda: "")


def without(monkeypatch: pytest.MonkeyPatch) -> tuple[mooncake.Figures, list[str]]:
    """What a machine finds that must not install anything, and what it says."""
    monkeypatch.setattr(mooncake, "peer_python", lambda *_: pytest.fail("it installs"))
    said: list[str] = []
    return mooncake.store(said.append), said


def test_a_missing_library_is_told_by_its_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mooncake.DEBIAN_PACKAGES, "libnothere.so.9", "libnothere9")
    reason = "it needs libnothere9 of Debian"
    assert without(monkeypatch) == ({"left_out": reason}, [f"without Mooncake: {reason}"])


def test_it_does_not_run_where_its_sockets_could_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enclosure, "why_not", lambda: "no namespaces here")
    assert without(monkeypatch)[0] == {"left_out": "no namespaces here"}


def test_it_is_left_out_where_pip_cannot_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(mooncake, "peer_python", fails)
    assert mooncake.engine(lambda line: None)["left_out"].startswith("pip cannot install mooncake-transfer-engine")


def test_a_run_that_fails_tells_what_it_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "peer_python", lambda *_: "python")
    monkeypatch.setattr(enclosure, "command", lambda words: ["sh", "-c", "echo no memory >&2; exit 3"])
    with pytest.raises(RuntimeError, match="mooncake_engine ended with 3:\nno memory"):
        mooncake.engine(lambda line: None)


def test_its_figures_are_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "peer_python", lambda *_: "python")
    monkeypatch.setattr(enclosure, "command", lambda words: ["sh", "-c", "echo a warning; echo '{\"exists_ms\": 0.5}'"])
    assert mooncake.store(lambda line: None) == {"exists_ms": 0.5}
