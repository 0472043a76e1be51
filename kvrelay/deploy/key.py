"""The cluster's shared key, and files that only their owner may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvrelay.errors import Misconfigured

_SHORTEST_BYTES = 16
_OTHERS = 0o077
"""Permissions of everybody but the owner."""


def read_key(path: Path) -> bytes:
    """The key: the file's bytes, as they are. Raises ``Misconfigured``."""
    try:
        key, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise Misconfigured(
            f"cannot read the key file {path}: {error.strerror}; that of a cluster of kvrelay up is in its run "
            "directory and called key"
        ) from error
    if mode & _OTHERS:
        raise Misconfigured(f"the key file {path} is open to other users; run: chmod 600 {path}")
    if len(key) < _SHORTEST_BYTES:
        raise Misconfigured(
            f"the key in {path} is shorter than {_SHORTEST_BYTES} bytes; "
            f"run: (umask 077; head -c 32 /dev/urandom > {path})"
        )
    return key


def new_key() -> str:
    """A random key, as text."""
    return secrets.token_hex(32)


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read, replacing an old one."""
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as file:
        file.write(text)
