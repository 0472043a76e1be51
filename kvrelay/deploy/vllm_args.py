"""Which of vLLM's own flags an operator may add to a worker. It must never let one through that changes KV unseen."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.errors import Misconfigured

ALLOWED = frozenset(
    {
        "--enable-auto-tool-choice", "--tool-call-parser", "--tool-parser-plugin", "--tool-strict-level",
        "--exclude-tools-when-tool-choice-none", "--reasoning-parser", "--reasoning-parser-plugin",
        "--structured-outputs-config", "--max-num-seqs", "--max-logprobs", "--uvicorn-log-level",
    }
)  # fmt: skip
"""Flags that change neither the bytes of KV, which no fingerprint would tell, nor what routers know of a worker: how a
chat is rendered, where it listens, what it takes for granted."""


def require_allowed(arguments: Iterable[str]) -> tuple[str, ...]:
    """``worker.vllm_args`` as vLLM gets them. Raises ``Misconfigured``.

    A flag and its value are one argument: a word on its own would be a model to vLLM, wherever it stands.
    """
    taken = tuple(arguments)
    for argument in taken:
        if not argument.startswith("--"):
            raise Misconfigured(f"worker.vllm_args has {argument!r}; write each flag with its value, as --name=value")
        name = argument.partition("=")[0].replace("_", "-")
        if name not in ALLOWED:
            raise Misconfigured(
                f"worker.vllm_args has {name}, which kvrelay sets itself or which may change KV or how chats are "
                f"rendered; it takes {', '.join(sorted(ALLOWED))}"
            )
    return taken
