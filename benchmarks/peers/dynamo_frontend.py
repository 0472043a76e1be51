"""NVIDIA Dynamo's frontend with its KV router (Rust) before its own mock workers, split.

Some of its sockets bind to all interfaces: it is started in a network namespace only (see ``routers.enclosure``).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.peers.environment import peer_python
from benchmarks.progress import Say
from benchmarks.routers.subject import Subject, answers, process
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port

PACKAGES = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
MODEL = "mock"
_BLOCK_TOKENS = 32
_WORKER = ("--block-size", str(_BLOCK_TOKENS), "--num-gpu-blocks-override", "12500", "--max-model-len", "8192")
_AT_ONCE = ("--speedup-ratio", "1000000", "--max-num-seqs", "256")
"""Its mockers simulate an engine's time; this makes it vanish."""


def prepare(say: Say) -> Path:
    """The interpreter that has it."""
    return peer_python("dynamo-frontend", PACKAGES, say)


@contextlib.asynccontextmanager
async def dynamo(python: Path) -> AsyncIterator[Subject]:
    """Two prefill and two decode workers."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-router-") as name:
        folder = Path(name)
        variables = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": name,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
        }
        mocker = [str(python), "-m", "dynamo.mocker", "--model-path", str(fetch()), "--model-name", MODEL]
        mocker += [*_WORKER, *_AT_ONCE, "--num-workers", "2", "--disaggregation-mode"]
        boots = f"{free_port()},{free_port()}"
        serve = [str(python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        serve += ["--router-mode", "kv", "--kv-cache-block-size", str(_BLOCK_TOKENS)]
        async with contextlib.AsyncExitStack() as stack:
            started = [
                await stack.enter_async_context(process(title, command, folder, variables))
                for title, command in (
                    ("prefill", [*mocker, "prefill", "--bootstrap-ports", boots]),
                    ("decode", [*mocker, "decode"]),
                    ("router", serve),
                )
            ]
            await answers(port, MODEL, folder)
            prefill, decode, router = (child.pid for child in started)
            yield Subject(port=port, model=MODEL, pids={"router": [router], "mocks": [prefill, decode]})
