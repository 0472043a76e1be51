"""What a person is told of a configuration that cannot be meant."""

from __future__ import annotations

import re

import pytest

from kvrelay.config_text import parse
from kvrelay.errors import Misconfigured


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("port = 1\n", "unknown key 'port'; did you mean 'router.port'?"),
        ("[stor]\n", "unknown key 'stor'; did you mean 'store'?"),
        ("[store]\nstreams = 99\n", "store.streams: expected int >= 1 and <= 16"),
        ("[router]\nqueue_s = 0\n", "router.queue_s: expected float > 0 and <= 86400"),
        ("[tenants.a]\npriority = 900\n", "tenants[...].priority: expected int >= -100 and <= 100"),
        ("[store]\ntransports = ['udp']\n", "store.transports[0]: expected tcp or shm or nixl, got 'udp'"),
        ("[worker]\nrole = 'x'\n", "worker.role: expected prefill or decode or both, got 'x'"),
        ("[store]\ntransports = []\n", "store.transports: none is named"),
        ("[store]\ntransports = ['tcp', 'shm', 'tcp']\n", "store.transports: tcp is named more than once"),
        ("[worker]\nblock_tokens = 17\n", "worker.block_tokens: 17 is no multiple of 32"),
        ("[worker]\nblock_tokens = 32\npage_tokens = 48\n", "worker.page_tokens: 48 and worker.block_tokens 32 must"),
        ("[worker]\npage_tokens = 48\n", "worker.page_tokens: 48 and the engine's own block of 128 must divide"),
        ("[store]\ntransports = ['local']\n", "store.transports: local is no way to another store"),
        (
            "[cluster]\nheartbeat_s = 5.0\ndead_after_s = 0.1\n",
            "cluster.heartbeat_s: 5 must be under cluster.dead_after_s, 0.1",
        ),
        ("[router]\nport = 7080\n", "router.control_port: 7080 is router.port as well"),
        ("host = ''\n", "unknown key 'host'; did you mean 'router.host' or 'worker.host'?"),
        ("router = 1\n", "router: expected object, got int"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused_by_its_key(toml: str, text: str) -> None:
    with pytest.raises(Misconfigured, match=f"^{re.escape(text)}"):
        parse(toml)


@pytest.mark.parametrize("sizes", ["block_tokens = 64", "page_tokens = 256", "block_tokens = 32\npage_tokens = 64"])
def test_blocks_and_pages_that_divide_one_another_are_taken(sizes: str) -> None:
    assert parse(f"[worker]\n{sizes}").worker
