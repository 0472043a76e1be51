"""What a client does wrong is said to it at once, with the unsplit engine's status, and costs nobody else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import MODEL
from tests.serving.probe import Probe
from tests.serving.test_equality import ask, completion
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

ROUTES = ["/v1/completions", "/v1/chat/completions"]


async def refused(probe: Probe, route: str, data: bytes) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    async with probe.http.post(probe.cluster.url + route, data=data, headers=headers) as response:
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"model": 3}', b'{"model": "smollm2"}'])
async def test_bodies_that_are_no_request_are_400(probe: Probe, route: str, data: bytes) -> None:
    status, error = await refused(probe, route, data)
    assert status == 400
    assert error["message"]


@pytest.mark.parametrize("route", ROUTES)
async def test_an_unknown_model_is_404_and_named(probe: Probe, route: str) -> None:
    body = {"model": "no-such-model", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    status, error = await refused(probe, route, json.dumps(body).encode())
    assert status == 404
    assert "no-such-model" in error["message"]


async def test_a_prompt_over_the_context_length_is_the_engines_400_within_a_second(probe: Probe, model: Path) -> None:
    body = completion((token_ids(model, 500, number=4000) * 5)[:2300])
    start = time.monotonic()
    status, error = await refused(probe, "/v1/completions", json.dumps(body).encode())
    assert time.monotonic() - start < 1.0
    assert status == 400
    assert "2048" in error["message"]
    await probe.assert_at_rest()


async def test_a_body_of_20_mb_passes_and_one_over_the_limit_is_a_json_413(probe: Probe) -> None:
    padded = {"model": MODEL, "prompt": "A short question?", "max_tokens": 1, "user": "x" * (20 << 20)}
    answer = await ask(probe, "/v1/completions", padded)
    assert answer["usage"]["completion_tokens"] == 1
    status, error = await refused(probe, "/v1/completions", b" " * (33 << 20))
    assert status == 413
    assert "bytes" in error["message"]
    await probe.assert_at_rest()


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"kvrelay": {"type": "PrefillLeg", "transfer": "x", "push_to": "192.0.2.1:1"}}},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1}},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}},
        {"cache_salt": "../../x"},
    ],
)
async def test_transfer_fields_of_a_client_never_reach_a_worker(
    probe: Probe, model: Path, fields: dict[str, Any]
) -> None:
    body = completion(token_ids(model, 60, number=4100))
    plain = await ask(probe, "/v1/completions", body)
    before = probe.counts()
    async with probe.http.post(probe.cluster.url + "/v1/completions", json=body | fields) as response:
        assert response.status == 200
        assert (await response.json())["choices"][0]["text"] == plain["choices"][0]["text"]
    counts = probe.counts()
    assert counts["pushes_failed"] == before["pushes_failed"], "nobody tried to push to a foreign address"
    assert counts.get("handoffs_malformed", 0) == 0
    await probe.assert_at_rest()


@pytest.mark.parametrize(
    "route", ["/reset_prefix_cache", "/inference/v1/generate", "/tokenize", "/v1/nothing", "/load"]
)
async def test_control_routes_of_a_worker_are_not_reachable(probe: Probe, route: str) -> None:
    async with probe.http.post(probe.cluster.url + route, json={}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["message"]
