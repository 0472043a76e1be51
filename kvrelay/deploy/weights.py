"""The digest of a model folder: two workers with the same one serve the same weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import xxhash

from kvrelay.deploy.cache import cache_root
from kvrelay.errors import Misconfigured
from kvrelay.identity import frame

_CHUNK_BYTES = 4 << 20


def weights_digest(folder: Path) -> str:
    """xxh3-128 (hex) over the names and contents of the folder's config and weights.

    Remembered in the user's cache by path, size and time of change, because large weights take seconds to read.
    Raises ``Misconfigured`` when the folder holds no model.
    """
    files = _weight_files(folder)
    stamp = _stamp(files)
    note = cache_root() / "digests" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    known = note.read_text().split() if note.is_file() else []
    if len(known) == 2 and known[0] == stamp:
        return known[1]
    digest = _read_digest(files)
    with contextlib.suppress(OSError):  # a read-only home only costs the next reading
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(f"{stamp} {digest}\n")
        draft.replace(note)
    return digest


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise Misconfigured(f"{folder} is no model folder: it needs config.json and *.safetensors")
    return [folder / "config.json", *files]


def _stamp(files: list[Path]) -> str:
    parts: list[bytes] = []
    for file in files:
        stat = file.stat()
        parts += [file.name.encode(), str(stat.st_size).encode(), str(stat.st_mtime_ns).encode()]
    return hashlib.sha256(frame(parts)).hexdigest()


def _read_digest(files: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(frame([path.name.encode(), str(path.stat().st_size).encode()]))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
