"""One mock engine without any router before it: the control."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.routers.holders import MODEL
from benchmarks.routers.subject import Subject, answers, mocks


@contextlib.asynccontextmanager
async def direct() -> AsyncIterator[Subject]:
    """Its own process stands in for the router's."""
    with tempfile.TemporaryDirectory(prefix="bench-router-") as name:
        async with mocks(Path(name), sys.executable, 1, 0.0) as (fakes, ports):
            await answers(ports[0], MODEL, Path(name))
            yield Subject(port=ports[0], model=MODEL, pids={"router": [fakes.pid]})
