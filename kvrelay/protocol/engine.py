"""A router to an engine, inside ``kv_transfer_params`` of a request, and the token that engines ask for."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from kvrelay.errors import Malformed
from kvrelay.protocol.message import Message

HANDOFF_KEY = "kvrelay"
"""Our key in ``kv_transfer_params``; never accepted from clients."""
REPLAY_KEY = "kvrelay_replay"
"""Our key in ``vllm_xargs``: token ids with which the answer has to begin; never accepted from clients either."""


class PrefillLeg(Message, frozen=True, kw_only=True):
    """What P's connector is told."""

    transfer: str
    push_to: str | None
    """Address of D's node store; None when P and D share one."""


class DecodeLeg(Message, frozen=True, kw_only=True):
    """What D's connector is told: which transfers bring pages of this request's prompts. A hint, never an identity."""

    transfers: list[str]
    home: str | None = None
    """Address of P's node store, when it is another than D's: the pages that D generates go there for the next turn."""
    page_dtypes: list[str] = []
    """KV types of the pages that the transfers bring, where they are not D's own: it may load and convert those.

    The request's ``cache_salt`` is then ``identity.near_salt``: D's own cache keeps what was converted apart.
    """


Handoff = PrefillLeg | DecodeLeg


def handoff_params(leg: Handoff) -> dict[str, object]:
    """``leg`` as a JSON-ready ``kv_transfer_params`` value."""
    built: dict[str, object] = msgspec.to_builtins(leg)
    return {HANDOFF_KEY: built}


def read_handoff(params: object) -> Handoff | None:
    """The leg inside ``kv_transfer_params``; None when there is none. Raises ``Malformed``."""
    if not isinstance(params, dict) or HANDOFF_KEY not in params:
        return None
    try:
        return msgspec.convert(params[HANDOFF_KEY], PrefillLeg | DecodeLeg)
    except msgspec.ValidationError as error:
        raise Malformed(f"kv_transfer_params.{HANDOFF_KEY}: {error}") from error


def engine_key(key: bytes) -> str:
    """Bearer token of the cluster's engines; who sees it can ask engines, but cannot become a member."""
    return hmac.new(key, b"kvrelay/engine/1", hashlib.sha256).hexdigest()
