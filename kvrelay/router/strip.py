"""Removes from a client's body what only the router may say, and from an answer what only it may hear. It must
never touch what the client says to the model."""

from __future__ import annotations

import re

import msgspec

from kvrelay.errors import Malformed
from kvrelay.protocol.engine import HANDOFF_KEY

RESERVED = frozenset({"kv_transfer_params", "ec_transfer_params", "cache_salt", "kv_cache_report_mode", "priority"})
"""Fields that steer KV transfer or cache sharing inside an engine, or (``kv_cache_report_mode``, inside ``vllm_xargs``)
let it report blocks as new that it has had all along: their copies would be miscounted, and pages shown that are gone.
``priority`` would pass those who wait in an engine; a tenant's is the router's to keep."""
_TRANSFER_KEYS = frozenset({"kv_transfer_params", "ec_transfer_params"})
_TRANSFER = re.compile(rb'"(?:kv|ec)_transfer_params"\s*+:\s*+(?!null)')
"""Inside generated text the quotes would be escaped."""
_NULL = msgspec.Raw(b"null")
CONTENT = frozenset(
    {
        "messages", "prompt", "suffix", "tools", "functions", "documents", "response_format",
        "structured_outputs", "chat_template_kwargs", "metadata", "logit_bias",
    }
)  # fmt: skip
"""Fields of a body whose inside is the client's own: a tool may well have a parameter called ``cache_salt``."""

CONTAINERS = frozenset({dict, list})
"""What JSON's values stand in. To look up a value's type here takes a fifth of what ``isinstance`` takes."""


def strip_reserved(body: dict[str, object]) -> dict[str, object]:
    """``body`` without reserved keys, at any depth outside of content (``extra_body``, ``vllm_xargs``, ...)."""
    return {key: value if key in CONTENT else _clean(value) for key, value in body.items() if not _reserved(key)}


def without_transfer(answer: bytes) -> bytes:
    """A worker's whole ``answer`` without what its engine says of hand-offs: that is the router's, and no client's. A
    null stays, as in vLLM's shape. Raises ``Malformed``."""
    if not _TRANSFER.search(answer):
        return answer
    try:
        fields = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise Malformed(f"a worker's answer is no JSON object: {error}") from error
    return msgspec.json.encode(fields | dict.fromkeys(_TRANSFER_KEYS & fields.keys(), _NULL))


def _reserved(key: str) -> bool:
    return key in RESERVED or key.startswith(HANDOFF_KEY)


def _clean(value: object) -> object:
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items() if not _reserved(key)}
    if isinstance(value, list) and CONTAINERS & set(map(type, value)):
        return [_clean(item) for item in value]
    return value
