"""Who may ask for what."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.config import Config, RouterConfig, TenantConfig
from kvrelay.config_text import parse, render
from kvrelay.errors import BadRequest, Misconfigured
from kvrelay.policy.admit import Slo
from kvrelay.router.promises import Promises, limits
from tests.patience import until
from tests.router.cluster import Cluster

CONFIG = Config(
    router=RouterConfig(slo_ttft_s=2.0),
    tenants={"gold": TenantConfig(share=3.0, priority=5, slo_ttft_s=0.5), "free": TenantConfig(slo_ttft_s=0.0)},
)


@pytest.mark.parametrize(
    ("tenant", "headers", "slo"),
    [
        ("", {}, Slo(ttft_s=2.0)),
        ("gold", {}, Slo(ttft_s=0.5, priority=5, share=3.0)),
        ("free", {}, Slo()),
        ("free", {"x-kvrelay-ttft-s": "1.5", "x-kvrelay-tpot-s": "0.05"}, Slo(ttft_s=1.5, tpot_s=0.05)),
        ("gold", {"x-kvrelay-ttft-s": "0"}, Slo(priority=5, share=3.0)),
        # A request may step back, and never ahead of its tenant.
        ("gold", {"x-kvrelay-priority": "-2"}, Slo(ttft_s=0.5, priority=-2, share=3.0)),
        ("free", {"x-kvrelay-priority": "9"}, Slo()),
    ],
)
def test_headers_win_over_tenants_and_those_over_the_router(tenant: str, headers: dict[str, str], slo: Slo) -> None:
    assert Promises(CONFIG, frozenset({"gold", "free"})).of(tenant, headers) == slo


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "-1", "1e9", ""])
def test_a_header_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="x-kvrelay-ttft-s"):
        Promises(Config(), frozenset()).of("", {"x-kvrelay-ttft-s": text})


def test_a_tenant_without_a_key_is_an_error_that_says_what_to_add() -> None:
    with pytest.raises(Misconfigured, match=r"tenants.gold: it has no key in router.api_keys; add gold:KEY there"):
        Promises(CONFIG, frozenset({"free"}))


def test_tenants_are_written_and_read_as_toml() -> None:
    assert parse(render(CONFIG)) == CONFIG
    with pytest.raises(Misconfigured, match="did you mean 'share'"):
        parse("[tenants.gold]\nshar = 2")


async def test_a_bad_header_is_a_400(cluster: Cluster) -> None:
    await cluster.split()
    headers = {"x-kvrelay-tpot-s": "fast"}
    async with cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "x-kvrelay-tpot-s"


def test_routers_that_share_a_port_promise_their_part_of_the_kv() -> None:
    assert [limits(RouterConfig(replicas=count), ()).kv_share for count in (1, 4)] == [1.0, 0.25]


@pytest.mark.parametrize(("tenants", "shared"), [((), False), (("gold",), False), (("gold", "free"), True)])
def test_places_are_kept_for_others_where_there_are_others(tenants: tuple[str, ...], shared: bool) -> None:
    assert limits(RouterConfig(), tenants).shared is shared


async def test_who_is_refused_at_once_can_look_up_what_was_predicted(cluster: Cluster) -> None:
    _, decode = await cluster.split()
    for _ in range(8):
        cluster.router.brain.experience.saw("p1", lambda perf: perf.saw_prefill(100, 0, 0.1))
    decode.hold.clear()
    busy = asyncio.create_task(cluster.complete())
    await until(lambda: decode.in_flight == 1)
    body, promise = {"model": "tiny", "prompt": "Hello, you"}, {"x-kvrelay-ttft-s": "1e-9"}
    status, answer, headers = await cluster.post("/v1/completions", body, headers=promise)
    assert status == 503
    async with cluster.http.get(f"/kvrelay/requests/{headers['x-request-id']}") as response:
        told = await response.json()
    assert (told["path"], told["status"], told["refusal"]) == ("none", 503, answer["error"]["message"])
    assert told["decision"][0]["ttft_s"] > 1e-9
    decode.hold.set()
    await busy
    assert await cluster.metric('kvrelay_requests_total{path="none",status="503"}') == 1


async def test_a_request_waits_for_its_turn_and_is_answered(cluster: Cluster) -> None:
    """More prompts at once than P and its queue take, with room for all in the router."""
    prefill, decode = await cluster.split()
    answers = await asyncio.gather(*(cluster.complete(max_tokens=500) for _ in range(12)))
    assert len(answers) == 12
    assert (len(prefill.bodies()), len(decode.bodies())) == (12, 12)
