"""The cluster's shared key, and files that only their owner may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvrelay.errors import Misconfigured

_SHORTEST_BYTES = 16


def read_key(path: Path) -> bytes:
    """The key: the file's bytes, as they are. Raises ``Misconfigured``."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise Misconfigured(f"cannot read the key file {path}: {error.strerror}") from error
    if len(key) < _SHORTEST_BYTES:
        raise Misconfigured(
            f"the key in {path} is shorter than {_SHORTEST_BYTES} bytes; run: openssl rand -hex 32 > {path}"
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
