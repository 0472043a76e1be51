"""What a loader reports, awaited."""

from __future__ import annotations

from kvrelay.connector.load import LoadResult
from kvrelay.connector.loader import Loader
from tests.patience import wait_until


def result_of(loader: Loader) -> LoadResult:
    """The result of the one load that was started; it is reported once."""
    results: list[LoadResult] = []

    def reported() -> bool:
        results.extend(loader.collect())
        return bool(results)

    wait_until(reported)
    (result,) = results
    assert loader.collect() == []
    return result
