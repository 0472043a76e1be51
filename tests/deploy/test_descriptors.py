"""Tests of deploy/descriptors.py: in a process of its own, which the limit is for."""

from __future__ import annotations

import subprocess
import sys

RAISED = """
import resource
from kvrelay.deploy.descriptors import raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_a_process_takes_as_many_descriptors_as_its_user_may_have() -> None:
    subprocess.run([sys.executable, "-c", RAISED], check=True)
