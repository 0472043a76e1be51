"""Tests of benchmarks/peers/mooncake.py: where it cannot run, the reason stands where its figures would."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from benchmarks.links import Load
from benchmarks.peers import mooncake, mooncake_engine, mooncake_store
from benchmarks.routers import enclosure
from kvrelay.types import PageFormat


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


def test_a_run_that_hangs_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_LONGEST_S", 0.5)
    monkeypatch.setattr(mooncake, "peer_python", lambda *_: "python")
    monkeypatch.setattr(enclosure, "command", lambda words: ["sh", "-c", "sleep 1000 & wait", *words])
    with pytest.raises(RuntimeError, match="mooncake_engine was not over"):
        mooncake.engine(lambda line: None)


def _dies(size: int, pipe: Connection) -> None:
    """A receiver that finds no library."""
    raise SystemExit(1)


def _stands_still(size: int, pipe: Connection) -> None:
    """A receiver that says nothing before it is told to end."""
    pipe.recv()


@pytest.mark.parametrize(("receive", "answer_s"), [(_dies, 1e3), (_stands_still, 0.1)], ids=["dies", "stands still"])
def test_a_receiver_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, receive: object, answer_s: float
) -> None:
    monkeypatch.setattr(mooncake_engine, "_receive", receive)
    monkeypatch.setattr(mooncake_engine, "_engine_with", lambda memory: None)
    monkeypatch.setattr(mooncake_engine, "_ANSWER_S", answer_s)
    load = Load("one page", PageFormat(layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=8), 1)
    with pytest.raises(RuntimeError, match="the receiver"):
        mooncake_engine.writes_s(load)


def test_a_master_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_store, "_STOP_S", 0.1)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mooncake_store._stop(process)
    assert process.returncode == -9
