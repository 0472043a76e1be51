"""The shaped link of the benchmarks: it joins two namespaces, and leaves nothing on the machine."""

from __future__ import annotations

import os
import subprocess

import pytest

from benchmarks.shaping.namespaces import Namespace, shaped_pair, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")


def namespaces() -> set[str]:
    """Those of this process: others may be measuring."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = (line.split()[0] for line in listed.stdout.splitlines())
    return {name for name in names if name.startswith(f"kvrelay-{os.getpid()}-")}


def output(end: Namespace, *words: str) -> str:
    return subprocess.run(end.command(*words), capture_output=True, text=True, check=True).stdout


def test_each_end_has_its_address_and_the_wanted_speed_and_no_other_way_out() -> None:
    with shaped_pair(50_000_000) as ends:
        for end in ends:
            assert end.address in output(end, "ip", "-br", "address")
            assert "rate 50Mbit" in output(end, "tc", "qdisc", "show", "dev", "veth0")
            assert "default" not in output(end, "ip", "route")


def test_a_failure_inside_leaves_nothing_behind() -> None:
    before = namespaces()
    seen: set[str] = set()

    def fail() -> None:
        with shaped_pair(50_000_000):
            seen.update(namespaces() - before)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(seen) == 2
    assert namespaces() == before


def test_an_interrupted_setup_leaves_nothing_behind() -> None:
    before = namespaces()
    with pytest.raises(subprocess.CalledProcessError), shaped_pair(-1):
        pass
    assert namespaces() == before
