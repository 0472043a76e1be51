"""Keys, tenants and salts."""

from __future__ import annotations

import pytest

from kvrelay.errors import BadRequest, Misconfigured
from kvrelay.router.keys import OPEN, Keyring, tenant_salt

CLUSTER = b"c" * 32


def test_without_keys_everybody_is_the_same_open_tenant() -> None:
    assert Keyring((), CLUSTER).authenticate("Bearer anything") == Keyring((), CLUSTER).authenticate(None) == OPEN


@pytest.mark.parametrize("header", ["Bearer k1", "bearer k1", "Bearer  k1 "])
def test_a_tenant_is_known_by_its_key(header: str) -> None:
    assert Keyring(("acme:k1", "k2"), CLUSTER).authenticate(header).name == "acme"


@pytest.mark.parametrize(
    "header", [None, "", "k1", "Basic k1", "Bearer", "Bearer acme:k1", "Bearer k1x", "Bearer \udcff"]
)
def test_anybody_else_is_a_401(header: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        Keyring(("acme:k1", "k2"), CLUSTER).authenticate(header)
    assert refused.value.status == 401


@pytest.mark.parametrize("keys", [("",), ("acme:",), ("acme: ",), ("acme:k", "zoo:k"), ("k", "acme:k")])
def test_keys_that_let_the_wrong_one_in_are_refused_at_start(keys: tuple[str, ...]) -> None:
    with pytest.raises(Misconfigured, match=r"router\.api_keys"):
        Keyring(keys, CLUSTER)


def test_salts_differ_by_tenant_by_kind_and_by_cluster_and_are_equal_on_every_router() -> None:
    salts = {
        tenant_salt(key, kind, name)
        for key in (CLUSTER, b"d" * 32)
        for kind in ("tenant", "key")
        for name in ("", "a", "ab", "../../x", "a\0b", "x" * 10_000)
    }
    assert len(salts) == 24
    assert all(len(salt) == 64 and salt.isalnum() for salt in salts)
    assert tenant_salt(CLUSTER, "tenant", "a") == tenant_salt(CLUSTER, "tenant", "a")


def test_a_bare_key_never_shows_in_its_tenants_name() -> None:
    assert "secret" not in Keyring(("secret",), CLUSTER).authenticate("Bearer secret").name
