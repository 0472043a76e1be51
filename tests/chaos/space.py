"""A network namespace of this run's own, whose one link ends here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvrelay.deploy.chaos.network import why_not

NAME = f"chaos-apart-{os.getpid()}"
SPACE = f"kvrelay-{os.getpid()}-apart"
HERE = f"kv{os.getpid()}"
NEAR, FAR = (f"198.18.{os.getpid() // 60 % 240 + 10}.{4 * (os.getpid() % 60) + end}" for end in (1, 2))
"""Of this run of the tests alone, in a range that is reserved for such things."""


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def apart() -> Iterator[None]:
    """A network namespace whose one link ends here."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        if (made := ip("netns", "add", SPACE)).returncode:
            pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        stack.callback(ip, "netns", "delete", SPACE)
        stack.callback(ip, "link", "delete", HERE)  # with the namespace it would go some time later
        # By itself: the kernel takes its time with what was in a namespace, and the next test has a link of this name.
        stack.callback(ip, "link", "delete", HERE)
        for words in (
            f"link add {HERE} type veth peer name eth0 netns {SPACE}",
            f"address add {NEAR}/30 dev {HERE}",
            f"link set {HERE} up",
            f"-n {SPACE} address add {FAR}/30 dev eth0",
            f"-n {SPACE} link set eth0 up",
            f"-n {SPACE} link set lo up",
        ):
            made = ip(*words.split())
            assert made.returncode == 0, made.stderr
        yield
