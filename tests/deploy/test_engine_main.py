"""Tests of deploy/engine_main.py: what becomes of a process in which a thread dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
import threading, time
from kvrelay.deploy import engine_main
assert threading.excepthook is threading.__excepthook__, "who imports it keeps its own hook"
engine_main.watch_threads()
if {ours}:
    from pathlib import Path
    from kvrelay.store.client import StoreClient
    from kvrelay.store.tether import Tether
    Tether._keep_link = lambda self: 1 / 0
    StoreClient(Path("none"), b"k" * 32, owner="w/1", format=None).start()
    time.sleep(600)
else:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
print("still here")
"""


def result_of(ours: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(ours=ours)))
    return subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)


def test_an_engine_ends_with_a_dead_thread_of_kvrelay_and_says_why(tmp_path: Path) -> None:
    result = result_of(True, tmp_path)
    assert result.returncode == -signal.SIGKILL
    assert "ZeroDivisionError" in result.stderr
    assert "a thread of kvrelay died; ending this engine" in result.stderr


def test_an_engine_goes_on_without_a_thread_of_somebody_else(tmp_path: Path) -> None:
    result = result_of(False, tmp_path)
    assert result.returncode == 0
    assert "ZeroDivisionError" in result.stderr
    assert result.stdout == "still here\n"
