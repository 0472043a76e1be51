"""``kvrelay up --mock`` as a person runs it: a process, questions, faults, Ctrl-C, nothing left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from kvrelay.deploy.process import Child
from tests.deploy.processes import all_dead, tree
from tests.deploy.test_up import read_until

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
async def up(run_dir: Path) -> AsyncIterator[Child]:
    flags = ["--mock", "3x2", "--stores", "2", "--time-scale", "0.05", "--port", "0", "--control-port", "0"]
    environment = {**os.environ, "KVRELAY_RUN_DIR": str(run_dir / "r"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "kvrelay", "up", *flags]
    child = await Child.start("up", command, environment, asyncio.subprocess.PIPE)
    yield child
    await child.stop(grace_s=20)


async def test_up_whose_output_is_closed_ends_and_leaves_nothing(tmp_path: Path) -> None:
    """As in ``kvrelay up --mock 1x1 | head -1``."""
    environment = {name: value for name, value in os.environ.items() if name != "KVRELAY_RUN_DIR"}
    command = [sys.executable, "-m", "kvrelay", "up", "--mock", "1x1", "--port", "0", "--control-port", "0"]
    up = await asyncio.create_subprocess_exec(
        *command,
        stdout=(output := os.pipe())[1],
        stderr=asyncio.subprocess.PIPE,
        env=environment | {"TMPDIR": str(tmp_path)},
    )
    os.close(output[1])
    with os.fdopen(output[0]) as read:
        assert (await asyncio.to_thread(read.readline)).startswith(f"Run directory: {tmp_path}/kvrelay-")
    processes = tree(up.pid)
    _, told = await up.communicate()
    assert (up.returncode, told) == (1, b"Stopped: nobody reads what this prints any more.\n")
    assert await all_dead(processes)
    assert list(tmp_path.iterdir()) == []


async def kvrelay(*arguments: str) -> tuple[int | None, str]:
    """Exit status and output of a command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_a_mock_cluster_answers_suffers_and_ends(up: Child, run_dir: Path) -> None:
    shown = await read_until(up, "Ctrl-C ends it")
    assert "(logs, key)" in shown.splitlines()[0]
    assert "cores" not in shown, "mock workers want no cores of their own"
    processes = tree(up.pid)
    url = re.search(r"Serving at (\S+)", shown)
    route = re.search(r"--port (\d+) --key-file (\S+)", shown)
    assert url is not None
    assert route is not None
    flags = ("--port", route[1], "--key-file", route[2])
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url[1]}/health") as response:
            health = await response.json()
        assert [len(health["workers"]), len(health["stores"])] == [5, 2]
        assert health["status"] == "ok"
        body = {"model": "made-up", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        async with http.post(f"{url[1]}/v1/chat/completions", json=body) as response:
            answer = await response.json()
    assert answer["usage"]["completion_tokens"] == 5
    status, said = await kvrelay("ask", "What is a KV cache?", "--url", url[1], "--max-tokens", "4")
    assert status == 0, said
    assert "prefill-" in said
    assert "decode-" in said
    drain = re.search(r"drain WORKER (--key-file \S+ --router \S+)\n", shown)
    assert drain is not None, "its control port is not the one that drain tries itself"
    status, said = await kvrelay("drain", "prefill-2", *drain[1].split())
    assert (status, said) == (0, "prefill-2 is empty: it can be stopped.\n")
    status, said = await kvrelay("fault", "decode-1", "slow=3,hang", *flags)
    assert status == 0, said
    assert "hang=true,slow=3" in said
    assert (await kvrelay("fault", *flags))[1].count("well") == 6, "two stores and four workers"
    status, said = await kvrelay("fault", "decode-9", "none", *flags)
    assert (status, "there are prefill-0, prefill-1" in said) == (1, True)
    os.kill(up.pid, signal.SIGINT)
    await read_until(up, "Stopped.")
    assert await up.wait() == 0
    assert await all_dead(processes)
    assert sorted(path.name for path in (run_dir / "r").iterdir()) == ["logs"]
