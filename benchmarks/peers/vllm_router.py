"""vllm-router (Rust) before mock engines: with NIXL's hand-off between two pools, or round robin over one."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.peers.environment import peer_python
from benchmarks.progress import Say
from benchmarks.routers.subject import Subject, answers, mocks, process
from kvrelay.deploy.ports import free_port

PACKAGES = ("vllm-router==0.1.17", "setproctitle==1.3.7", "orjson==3.11.5")
MODEL = "mock"


def prepare(say: Say) -> Path:
    """The interpreter that has it."""
    return peer_python("vllm-router", PACKAGES, say)


@contextlib.asynccontextmanager
async def vllm_router(python: Path, *, split: bool, tick_s: float = 0.0) -> AsyncIterator[Subject]:
    """Two prefill and two decode engines, or two that do both."""
    port, count = free_port(), 4 if split else 2
    with tempfile.TemporaryDirectory(prefix="bench-router-") as name:
        folder = Path(name)
        async with mocks(folder, sys.executable, count, tick_s) as (fakes, ports):
            urls = [f"http://127.0.0.1:{engine}" for engine in ports]
            pools = [word for url in urls[:2] for word in ("--prefill", url)]
            pools += [word for url in urls[2:] for word in ("--decode", url)]
            split_words = ["--vllm-pd-disaggregation", *pools, "--kv-connector", "nixl", "--policy", "round_robin"]
            words = split_words if split else ["--worker-urls", *urls, "--policy", "round_robin"]
            common = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
            command = [str(python), "-m", "vllm_router.launch_router", *words, *common, "--log-level", "error"]
            async with process("router", command, folder) as child:
                await answers(port, MODEL, folder)
                yield Subject(port=port, model=MODEL, pids={"router": [child.pid], "mocks": [fakes.pid]})
