"""Tests of deploy/members.py: which processes a configuration means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.members import Kind, Member, RunDir, members, settle_ports
from kvrelay.deploy.ports import PortClaims
from kvrelay.errors import Misconfigured
from kvrelay.types import Role

RUN = RunDir(Path("/run/k"))
MODEL = Path("/models/m")
CLAIMS = PortClaims()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """No other test is kept from the ports of one that is over."""
    yield
    CLAIMS.release()


def made(**cluster: int) -> dict[str, Member]:
    return {member.name: member for member in members(Config(cluster=ClusterConfig(**cluster)), RUN, MODEL, CLAIMS)}


def value(member: Member, flag: str) -> str:
    return member.arguments[member.arguments.index(flag) + 1]


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        ({}, ["store-0", "router", "prefill-0", "decode-0"]),
        ({"prefill": 2, "decode": 1}, ["store-0", "router", "prefill-0", "prefill-1", "decode-0"]),
        ({"stores": 2}, ["store-0", "store-1", "router", "prefill-0", "decode-0"]),
        ({"prefill": 0, "decode": 0, "colocated": 2}, ["store-0", "router", "both-0", "both-1"]),
    ],
)
def test_a_cluster_has_its_members_in_the_order_of_their_start(cluster: dict[str, int], names: list[str]) -> None:
    assert list(made(**cluster)) == names


def test_with_two_stores_the_pools_are_on_two_nodes() -> None:
    found = made(stores=2, prefill=2, decode=2, colocated=1)
    at = {name: value(member, "--store-name") for name, member in found.items() if member.kind is Kind.WORKER}
    assert at == {
        "prefill-0": "store-0",
        "prefill-1": "store-0",
        "decode-0": "store-1",
        "decode-1": "store-1",
        "both-0": "store-0",
    }
    assert value(found["decode-0"], "--store-socket") == str(found["store-1"].socket)


def test_every_worker_has_its_own_cores_port_and_role() -> None:
    config = Config(worker=WorkerConfig(cpus="0-1"))
    workers = [member for member in members(config, RUN, MODEL, CLAIMS) if member.kind is Kind.WORKER]
    assert [value(worker, "--cpus") for worker in workers] == ["0", "1"]
    assert [worker.role for worker in workers] == [Role.PREFILL, Role.DECODE]
    assert len({worker.url for worker in workers}) == 2


def test_a_socket_path_that_no_system_call_takes_is_refused() -> None:
    with pytest.raises(Misconfigured, match="KVRELAY_RUN_DIR"):
        RunDir(Path("/" + "x" * 100)).socket("store-0")


def test_open_ports_are_settled_and_differ() -> None:
    router = settle_ports(Config(router=RouterConfig(port=0, control_port=0)), CLAIMS).router
    assert 0 < router.port != router.control_port > 0


def test_workers_of_a_cluster_listen_at_the_address_that_was_set_and_each_tells_its_own() -> None:
    for host, reached in (("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1")):
        found = members(Config(worker=WorkerConfig(host=host)), RUN, MODEL, CLAIMS)
        workers = [member for member in found if member.kind is Kind.WORKER]
        addresses = [f"{reached}:{value(worker, '--port')}" for worker in workers]
        assert [value(worker, "--advertise") for worker in workers] == addresses
        assert [worker.url for worker in workers] == [f"http://{address}" for address in addresses]


def test_mock_workers_and_stores_are_one_process_under_the_names_of_real_ones() -> None:
    mock = MockConfig(enabled=True, control_port=7090)
    config = Config(cluster=ClusterConfig(prefill=2, decode=1, colocated=1, stores=2), mock=mock)
    router, mocks = members(config, RUN, MODEL, CLAIMS)
    assert (router.kind, mocks.kind) == (Kind.ROUTER, Kind.MOCK)
    assert (value(mocks, "--size"), value(mocks, "--colocated")) == ("2x1", "1")
    assert mocks.registers == ("store-0", "store-1", "prefill-0", "prefill-1", "decode-0", "both-0")
    real = members(Config(cluster=config.cluster), RUN, MODEL, CLAIMS)
    assert {name for member in real for name in member.registers} == set(mocks.registers)


def test_a_replica_gets_no_port_that_something_else_was_told_to_use() -> None:
    with PortClaims() as claims:
        control = claims.free("127.0.0.1")
        told = RouterConfig(port=0, control_port=control, replicas=2)
        mock = MockConfig(enabled=True, control_port=control + 1)
        settled = settle_ports(Config(router=told, mock=mock), claims)
        routers = [member for member in members(settled, RUN, MODEL, claims) if member.kind is Kind.ROUTER]
    assert value(routers[0], "--control-port") == str(control)
    assert int(value(routers[1], "--control-port")) > control + 1


def test_the_port_for_faults_of_mock_workers_is_settled_as_well() -> None:
    open_ports = RouterConfig(port=0, control_port=0)
    settled = settle_ports(Config(mock=MockConfig(enabled=True), router=open_ports), CLAIMS).mock
    assert settled.control_port > 0


@pytest.mark.parametrize("mock", [False, True])
def test_routers_share_a_port_and_every_member_knows_the_control_port_of_each(mock: bool) -> None:
    config = Config(router=RouterConfig(replicas=2, control_port=7080), mock=MockConfig(enabled=mock))
    found = members(config, RUN, MODEL, CLAIMS)
    routers = [member for member in found if member.kind is Kind.ROUTER]
    assert [router.name for router in routers] == ["router", "router-1"]
    assert len({router.url for router in routers}) == 1
    controls = [router.control for router in routers]
    assert controls[0] == "127.0.0.1:7080"
    assert 7081 <= int(controls[1].split(":")[1]) < 7280, "the next free one: an operator has to name it"
    for router in routers:
        assert value(router, "--control-port") == router.control.split(":")[1]
    for member in found:
        if member.kind is not Kind.ROUTER:
            flags = zip(member.arguments, member.arguments[1:], strict=False)
            assert [given for flag, given in flags if flag == "--router"] == controls
