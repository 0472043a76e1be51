"""Where ``kvrelay up`` keeps what its routers learn, so that the next ones predict at once. It must never keep a
cluster from starting: what cannot be read is begun anew."""

from __future__ import annotations

import hashlib
import platform
import tempfile
from pathlib import Path

import msgspec

from kvrelay.config import Config
from kvrelay.deploy.cache import learned_root
from kvrelay.errors import Misconfigured
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.links import Links
from kvrelay.router.learned import PARTIAL, LearnedFile

MAX_FILES = 64
"""Set-ups that are remembered, the last ones: a file of many kinds of workers and ways has some 100 KB."""

PARTIAL_S = 86400.0
"""Age from which a file that was never written to its end is of a router that died meanwhile: a write takes seconds at
most."""


def keeping(config: Config) -> Config:
    """``config`` with a ``router.learned_file`` for clusters that are set up like this one.

    Unchanged where it names a file, where workers are simulated, which take the time that they are told to, and where
    there is no place to write to.
    """
    if config.router.learned_file or config.mock.enabled:
        return config
    path = learned_root() / f"{_setup(config)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_unreadable(path)
        _make_room(path)
    except OSError:
        return config
    return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, learned_file=str(path)))


def _setup(config: Config) -> str:
    """All that decides how fast something is. Workers' laws are kept by kind; but ways between stores go by names, and
    all clusters have the same ones."""
    decisive = platform.node(), config.model, config.worker, config.store, config.cluster.stores
    return hashlib.blake2b(msgspec.json.encode(decisive), digest_size=16).hexdigest()


def _drop_unreadable(path: Path) -> None:
    """A file of another version says nothing any more. Raises ``OSError``."""
    try:
        LearnedFile(path, Experience(Links())).load()
    except Misconfigured:
        path.unlink()


def _make_room(path: Path) -> None:
    """Forget the set-ups that were not used for longest, and what dead routers began to write. Raises ``OSError``."""
    now_s = _touched_s(path.parent)
    for partial in path.parent.glob(f"*{PARTIAL}"):
        if now_s - partial.stat().st_mtime > PARTIAL_S:
            partial.unlink(missing_ok=True)
    others = sorted((other for other in path.parent.glob("*.json") if other != path), key=lambda it: it.stat().st_mtime)
    for other in others[: max(0, len(others) - MAX_FILES + 1)]:
        other.unlink(missing_ok=True)


def _touched_s(folder: Path) -> float:
    """The time of a file that is written now, by the clock of whoever keeps the files. Raises ``OSError``."""
    with tempfile.NamedTemporaryFile(dir=folder) as touched:
        return Path(touched.name).stat().st_mtime
