"""Commands of the brain reach their requests, whatever becomes of others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from kvrelay.errors import Overloaded
from kvrelay.fleet.admission_queue import AdmissionQueue
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Plan, PrefillOrder, Refuse, Start
from kvrelay.policy.admit import Limits, Slo
from kvrelay.policy.route import Path
from kvrelay.router.clients import Clients
from kvrelay.router.desk import Desk
from kvrelay.router.exchange import Exchange
from kvrelay.router.keys import OPEN, Tenant
from kvrelay.router.prompts import Prompts
from kvrelay.router.readings import BrainReadings
from kvrelay.router.request import Kind, parse
from kvrelay.router.shortage import Shortage
from kvrelay.router.switchboard import Switchboard
from kvrelay.router.telemetry import Telemetry
from kvrelay.router.tokens import Tokens, load_tokens
from kvrelay.router.upstream import Upstream
from kvrelay.types import Role
from tests.fleet.values import worker
from tests.patience import PATIENCE_S
from tests.router.tiny_tokenizer import make_tokenizer

LOCAL = Plan(path=Path.LOCAL, local_reason="", prefills=())
REFUSE = Refuse(request_id="c", reason="it is late", after_s=1.0)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Tokens]:
    tokens = load_tokens(make_tokenizer(tmp_path_factory.mktemp("model")))
    yield tokens
    tokens.close()


@pytest.fixture
def desk(tokens: Tokens) -> Desk:
    """One worker with room for one request; others wait in the router."""
    brain = Brain(dead_after_s=1e9, transfer_wait_s=9.0, limits=Limits(queue_s=0.0, hold_s=99.0))
    brain.register_worker(worker("w1", Role.BOTH, kv_tokens=20), 0.0)
    shortage = Shortage(lambda: 0.0)
    upstream = Upstream(connect_s=1.0, engine_key="k", shortage=shortage)
    readings = BrainReadings(brain, lambda: 0.0, Clients(lambda: 0.0, shortage), shortage)
    return Desk(brain, upstream, Telemetry(readings), lambda: 0.0, Switchboard(), tokens)


def opened(desk: Desk, name: str, tenant: Tenant = OPEN) -> Exchange:
    request = parse(Kind.COMPLETION, b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 9}')
    prompts = Prompts(ids=[[1, 2, 3]], lengths=(3,))
    ready = desk.ready("tiny")
    return desk.open(request, prompts, ready, request_id=name, tenant=tenant, slo=Slo(), received_s=0.0)


async def test_a_tenant_is_told_of_its_requests_alone_and_nobody_is_looked_for_among_all_that_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        opened(desk, name)
    for name in "de":
        opened(desk, name, Tenant(name="other", salt="s"))
    monkeypatch.setattr(AdmissionQueue, "__iter__", None)
    monkeypatch.setattr("kvrelay.router.desk.MAX_RUNNING_TOLD", 2)
    assert [each["request_id"] for each in desk.running(OPEN.name)] == ["a", "b"]
    assert [each["request_id"] for each in desk.running("other")] == ["d", "e"]
    for name in "abcde":
        desk.close(name, 499)


class Broken:
    """P legs that cannot even be begun."""

    def send(self, order: PrefillOrder) -> None:
        raise RuntimeError(order.transfer)

    def close(self) -> None:
        """Nothing runs."""


async def test_a_client_that_hung_up_takes_nothing_from_those_behind_it(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    exchanges = {name: opened(desk, name) for name in "abc"}
    asked = {name: asyncio.create_task(exchanges[name].answer()) for name in "bc"}
    await asyncio.sleep(0)
    asked["b"].cancel()
    desk.obey([Start(request_id="b", plan=LOCAL), REFUSE])
    with pytest.raises(Overloaded, match="late"):
        await asyncio.wait_for(asked["c"], PATIENCE_S)
    assert not caplog.records
    for name in "abc":
        desk.close(name, 499)


async def test_what_fails_at_one_request_ends_that_one_alone(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    exchanges = {name: opened(desk, name) for name in "abc"}
    exchanges["b"]._prefills = Broken()  # type: ignore[assignment]
    asked = {name: asyncio.create_task(exchanges[name].answer()) for name in "bc"}
    await asyncio.sleep(0)
    order = PrefillOrder(index=0, worker="p", url="http://127.0.0.1:1", transfer="t", push_to=None)
    plan = Plan(path=Path.REMOTE_PREFILL, local_reason="", prefills=(order,))
    desk.obey([Start(request_id="b", plan=plan), REFUSE])
    for name, why in (("b", "failed"), ("c", "late")):
        with pytest.raises(Overloaded, match=why):
            await asyncio.wait_for(asked[name], PATIENCE_S)
    assert "Start of request b failed" in caplog.text
    for name in "abc":
        desk.close(name, 503)
