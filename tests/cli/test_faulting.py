"""What somebody hears who asks for faults with the wrong key, or where nobody is."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp.test_utils import TestServer

from kvrelay.cli.faulting import Route
from kvrelay.deploy.mock.control import Control
from kvrelay.deploy.ports import free_port
from kvrelay.errors import Lost, Refused


async def test_a_key_of_another_cluster_is_told_so_and_not_asked_for_again() -> None:
    server = TestServer(Control({}, "theirs").app())
    await server.start_server()
    assert server.port is not None
    try:
        with pytest.raises(Refused, match=f"at http://127.0.0.1:{server.port} have another key; give --key-file"):
            await asyncio.to_thread(Route(server.port, "ours").workers)
    finally:
        await server.close()


def test_a_port_without_mock_workers_is_told_in_words() -> None:
    port = free_port()
    told = f"no mock workers answer at http://127.0.0.1:{port} (Connection refused); give --port the one"
    with pytest.raises(Lost, match=re.escape(told)):
        Route(port, "ours").workers()
