"""What a loader reports, awaited."""

from __future__ import annotations

import time

from kvrelay.connector.loader import Loader, LoadResult


def result_of(loader: Loader) -> LoadResult:
    """The result of the one load that was started; it is reported once."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if results := loader.collect():
            (result,) = results
            assert loader.collect() == []
            return result
        time.sleep(0.002)
    raise AssertionError(f"the load was never reported: {loader}")
