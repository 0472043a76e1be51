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

    Remembered in the user's cache, because large weights take seconds to read, until a file is another one, has another
    size, or was written to: that changes ``ctime``, which nobody can set, as copying tools and images set ``mtime``.
    Raises ``Misconfigured`` when the folder holds no model.
    """
    files = _weight_files(folder)
    stamp = _stamp(files)
    note = cache_root() / "digests" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    known = _read_note(note)
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


def _read_note(note: Path) -> list[str]:
    """Its words; none when there is no note, or something else is there."""
    try:
        return note.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def _stamp(files: list[Path]) -> str:
    parts: list[bytes] = []
    for file in files:
        stat = file.stat()
        facts = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        parts += [os.fsencode(file.name), *(str(fact).encode() for fact in facts)]
    return hashlib.sha256(frame(parts)).hexdigest()


def _read_digest(files: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(frame([os.fsencode(path.name), str(path.stat().st_size).encode()]))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
