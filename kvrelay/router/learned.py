"""Keeps what the brain learned in a file, so that a new router predicts at once. It must never stop a router that runs:
what cannot be written is told once."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from kvrelay.errors import Misconfigured
from kvrelay.fleet.experience import Experience, Learned

log = logging.getLogger("kvrelay.router")

SAVE_S = 30.0
MAX_FILE_BYTES = 64 << 20


class LearnedFile:
    """``path``, read when the router starts and written every ``SAVE_S``."""

    def __init__(self, path: Path, experience: Experience) -> None:
        self._path = path
        self._experience = experience
        self._told = False

    def __repr__(self) -> str:
        return f"<LearnedFile {self._path}>"

    def load(self) -> None:
        """Raises ``Misconfigured`` when something else than our file is there.

        One of ours with values that cannot be is ignored: prices made of them would fail every request.
        """
        if not self._path.exists():
            return
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise Misconfigured(f"router.learned_file {self._path} is no file of learned timings: it is too long")
            learned = msgspec.json.decode(self._path.read_bytes(), type=Learned)
        except OSError as error:
            raise Misconfigured(f"router.learned_file {self._path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise Misconfigured(
                f"router.learned_file {self._path} is no file of learned timings ({error}); remove it or name another"
            ) from error
        if problem := learned.impossible():
            log.warning("router.learned_file %s is ignored and will be written anew: %s", self._path, problem)
        else:
            self._experience.recall(learned)

    async def run(self) -> None:
        """Save now and then, and a last time when cancelled."""
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                self.save()
        finally:
            self.save()

    def save(self) -> None:
        """Write all or nothing."""
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            partial.write_bytes(msgspec.json.encode(self._experience.learned()))
            partial.replace(self._path)
        except OSError as error:
            if not self._told:
                log.warning("what was learned cannot be kept in %s: %s", self._path, error.strerror)
            self._told = True
