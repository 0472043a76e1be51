"""First three frames of every link, and what a refusal looks like.

Both sides prove the cluster's key before anything else is said.
"""

from __future__ import annotations

import hashlib
import hmac

from kvrelay.errors import Refused
from kvrelay.protocol.message import Message


class Hello(Message, frozen=True, kw_only=True):
    version: int
    purpose: str
    """``client`` (a worker or script at its node's store), ``inquiry`` (a script's to any store: what is there?),
    ``peer`` (store to store), ``data`` (a peer's second link, for payload), ``map`` (a peer of the same machine that
    maps an arena), ``feed`` (a member's to a router), ``operator`` (a command's to a router)."""
    sender: str
    nonce: bytes


class Challenge(Message, frozen=True, kw_only=True):
    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True, kw_only=True):
    proof: bytes


class Rejected(Message, frozen=True, kw_only=True):
    """The link is refused, or a request failed; ``code`` is an error class of ``errors``."""

    code: str
    reason: str
    id: int = 0


class Welcome(Message, frozen=True, kw_only=True):
    receiver: str


def prove(key: bytes, side: str, hello_nonce: bytes, challenge_nonce: bytes) -> bytes:
    """Proof that ``side`` (``server`` or ``client``) holds ``key``, bound to both nonces."""
    text = side.encode() + b"\0" + hello_nonce + challenge_nonce
    return hmac.new(key, text, hashlib.sha256).digest()


def check_proof(key: bytes, side: str, hello_nonce: bytes, challenge_nonce: bytes, proof: bytes) -> None:
    """Raise ``Refused`` unless ``proof`` is right."""
    if not hmac.compare_digest(prove(key, side, hello_nonce, challenge_nonce), proof):
        raise Refused("the peer does not hold this cluster's key; give both sides the same key file")


HandshakeMessage = Hello | Challenge | Proof | Rejected | Welcome
