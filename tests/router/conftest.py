"""A model folder with a real tokenizer, and a router on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.router.cluster import Cluster
from tests.router.tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cluster(model_folder: Path) -> AsyncIterator[Cluster]:
    async with Cluster(model_folder) as running:
        yield running
        await running.at_rest()
