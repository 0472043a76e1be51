"""Which of vLLM's own flags an operator may add to a worker. It must never let one through that changes KV unseen."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvrelay.errors import Misconfigured

ALLOWED = frozenset(
    {
        "--enable-auto-tool-choice", "--tool-call-parser", "--tool-strict-level", "--reasoning-parser",
        "--structured-outputs-config", "--max-num-seqs", "--max-logprobs", "--uvicorn-log-level",
    }
)  # fmt: skip
"""Flags that change neither the bytes of KV, which no fingerprint would tell, nor what routers know of a worker: how a
chat is rendered, where it listens, what it takes for granted. A parser's plug-in could change all of that: it is a
program of the operator's, which runs in the engine."""
_STRUCTURED = "--structured-outputs-config"
STRUCTURED_KEYS = frozenset(
    {
        "backend", "disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning",
        "reasoning_parser",
    }
)  # fmt: skip
"""All that it has but ``reasoning_parser_plugin``."""


def require_allowed(arguments: Iterable[str]) -> tuple[str, ...]:
    """``worker.vllm_args`` as vLLM gets them. Raises ``Misconfigured``.

    A flag and its value are one argument: a word on its own would be a model to vLLM, wherever it stands.
    """
    taken = tuple(arguments)
    for argument in taken:
        if not argument.startswith("--"):
            raise Misconfigured(f"worker.vllm_args has {argument!r}; write each flag with its value, as --name=value")
        name, _, value = argument.partition("=")
        name = name.replace("_", "-")
        if name not in ALLOWED:
            raise Misconfigured(
                f"worker.vllm_args has {name}, which kvrelay sets itself or which may change KV or how chats are "
                f"rendered; it takes {', '.join(sorted(ALLOWED))}"
            )
        if name == _STRUCTURED:
            _require_known_keys(value)
    return taken


def _require_known_keys(value: str) -> None:
    try:
        keys = set(msgspec.json.decode(value, type=dict[str, object]))
    except msgspec.DecodeError as error:
        raise Misconfigured(f"worker.vllm_args has {_STRUCTURED}={value}; write it as a JSON object") from error
    if unknown := keys - STRUCTURED_KEYS:
        listed, taken = ", ".join(sorted(unknown)), ", ".join(sorted(STRUCTURED_KEYS))
        raise Misconfigured(f"worker.vllm_args has {listed} in {_STRUCTURED}; it takes {taken}")
