"""Keeps what the brain learned in a file, so that a new router predicts at once. It must never stop a router that runs,
nor let it wait for a disk: what cannot be written is told once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from kvrelay.errors import Misconfigured
from kvrelay.fleet.experience import Experience, Learned

log = logging.getLogger("kvrelay.router")

SAVE_S = 30.0
LAST_SAVE_S = 2.0
"""Longest wait for the last write when the router ends; it takes milliseconds where a folder answers at all."""
WRITER = "kvrelay-learned"
"""Name of the thread that writes."""
MAX_FILE_BYTES = 64 << 20
PARTIAL = ".tmp"
"""End of the name of a file that is being written; what comes before tells its process."""


class LearnedFile:
    """``path``, read when the router starts and written every ``SAVE_S``."""

    def __init__(self, path: Path, experience: Experience) -> None:
        self._path = path
        self._experience = experience
        self._told = False
        self._writing: asyncio.Future[None] | None = None
        """The last write, which may be over."""

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
        """Save now and then, and a last time when cancelled, unless that takes longer than ``LAST_SAVE_S``."""
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                await self.save()
        finally:
            await self._save_last()

    async def save(self) -> None:
        """Write all or nothing, once the write before is over. On a thread: folders of users are often on other
        machines, and one that does not answer must not stop the loop."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        content = msgspec.json.encode(self._experience.learned())
        self._writing = asyncio.wrap_future(_on_thread(partial(self._write, content)))
        await asyncio.wait({self._writing})  # who is cancelled meanwhile does not cancel it
        self._writing.result()

    async def _save_last(self) -> None:
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await self.save()
        except TimeoutError:
            log.warning("what was learned last is not kept: %s took over %g s to write", self._path, LAST_SAVE_S)
            if self._writing is not None:
                self._writing.cancel()  # the loop will not hear of its end

    def _write(self, content: bytes) -> None:
        written = self._path.with_name(f"{self._path.name}.{os.getpid()}{PARTIAL}")
        try:
            written.write_bytes(content)
            written.replace(self._path)
        except OSError as error:
            if not self._told:
                log.warning("what was learned cannot be kept in %s: %s", self._path, error.strerror)
            self._told = True
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)  # the next router would write one of another name: on a full disk


def _on_thread(work: Callable[[], None]) -> Future[None]:
    """``work`` on a thread of its own: for one of the loop's executor the process would wait when it ends."""
    ended: Future[None] = Future()
    ended.set_running_or_notify_cancel()  # or an abandoned one could not be told its end

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # border: raised again by whoever waits for it
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name=WRITER, daemon=True).start()
    return ended
