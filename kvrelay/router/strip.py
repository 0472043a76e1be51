"""Removes from a client's body what only the router may say. It must never touch what the client says to the model."""

from __future__ import annotations

from kvrelay.protocol.engine import HANDOFF_KEY

RESERVED = frozenset({"kv_transfer_params", "ec_transfer_params", "cache_salt", "kv_cache_report_mode"})
"""Fields that steer KV transfer or cache sharing inside an engine, or (the last, inside ``vllm_xargs``) let it report
blocks as new that it has had all along: their copies would be miscounted, and pages shown that are gone."""
CONTENT = frozenset(
    {
        "messages", "prompt", "suffix", "tools", "functions", "documents", "response_format",
        "structured_outputs", "chat_template_kwargs", "metadata", "logit_bias",
    }
)  # fmt: skip
"""Fields whose inside is the client's own: a tool may well have a parameter called ``cache_salt``."""


def strip_reserved(body: dict[str, object]) -> dict[str, object]:
    """``body`` without reserved keys, at any depth outside of content (``extra_body``, ``vllm_xargs``, ...)."""
    return {key: _inside(key, value) for key, value in body.items() if not _reserved(key)}


def _reserved(key: str) -> bool:
    return key in RESERVED or key.startswith(HANDOFF_KEY)


def _inside(key: str, value: object) -> object:
    return value if key in CONTENT else _clean(value)


def _clean(value: object) -> object:
    if isinstance(value, dict):
        return strip_reserved(value)
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [_clean(item) for item in value]
    return value
