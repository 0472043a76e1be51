"""Who is calling: API keys to tenants, tenants to cache salts. It must never compare secrets in variable time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from kvrelay.errors import BadRequest, Misconfigured
from kvrelay.identity import frame
from kvrelay.types import Value

_UNAUTHORISED = "no valid API key; send the header 'Authorization: Bearer KEY'"


class Tenant(Value, frozen=True, kw_only=True):
    """A caller. Only tenants with the same ``salt`` share cached KV; an empty one is the open router's."""

    name: str
    salt: str


OPEN = Tenant(name="", salt="")


class Keyring:
    """Accepted bearer tokens, ``TENANT:KEY`` or ``KEY``; without any, everybody is the same open tenant.

    Raises ``Misconfigured`` on a key that is empty or given twice.
    """

    def __init__(self, api_keys: Sequence[str], cluster_key: bytes) -> None:
        self._tenants = [_entry(text, cluster_key) for text in api_keys]
        if len({key for key, _ in self._tenants}) < len(self._tenants):
            raise Misconfigured("router.api_keys: the same key is there twice; give every tenant keys of its own")

    def __repr__(self) -> str:
        return f"<Keyring {len(self._tenants)} keys>"

    @property
    def tenants(self) -> frozenset[str]:
        """Names of all tenants that have a key."""
        return frozenset(tenant.name for _, tenant in self._tenants)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an ``Authorization`` header. Raises ``BadRequest`` (401)."""
        if not self._tenants:
            return OPEN
        scheme, _, token = (authorization or "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        # All keys are compared, whichever matches, so that time says nothing about their order.
        matches = [tenant for key, tenant in self._tenants if hmac.compare_digest(key, given)]
        if scheme.lower() != "bearer" or not matches:
            raise BadRequest(_UNAUTHORISED, status=401)
        return matches[0]


def _entry(text: str, cluster_key: bytes) -> tuple[bytes, Tenant]:
    name, colon, key = text.partition(":")
    if not (key if colon else text).strip():
        raise Misconfigured(f"router.api_keys: the key of {name!r} is empty; write TENANT:KEY or KEY")
    if colon:
        return key.encode(), Tenant(name=name, salt=tenant_salt(cluster_key, "tenant", name))
    # A key without a tenant is a tenant of its own, named by a digest so that logs never show the key.
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return text.encode(), Tenant(name=f"key-{digest}", salt=tenant_salt(cluster_key, "key", text))


def tenant_salt(cluster_key: bytes, kind: str, name: str) -> str:
    """Equal on every router of a cluster, and not to be guessed outside of it."""
    message = frame([b"kvrelay/salt/1", kind.encode(), name.encode()])
    return hmac.new(cluster_key, message, hashlib.sha256).hexdigest()
