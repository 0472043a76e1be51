"""Tests of deploy/ports.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kvrelay.channel import bind_tcp
from kvrelay.deploy.ports import PortClaims, free_port, holder, is_free, require_free
from kvrelay.errors import Misconfigured


def listening() -> tuple[socket.socket, int]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock, int(sock.getsockname()[1])


def test_a_free_port_can_be_bound_and_lies_below_the_ephemeral_range() -> None:
    port = free_port()
    assert is_free("127.0.0.1", port)
    assert port < 32768


def test_a_taken_port_is_refused_with_its_holder_and_the_setting() -> None:
    sock, port = listening()
    with sock, pytest.raises(Misconfigured) as caught:
        require_free("127.0.0.1", port, "--port")
    assert f"port {port} is in use by pid {os.getpid()} (" in str(caught.value)
    assert "--port" in str(caught.value)


def test_a_port_that_was_closed_is_free_again() -> None:
    port = free_port()  # no outgoing connection of others takes it meanwhile
    with bind_tcp("127.0.0.1", port):
        assert not is_free("127.0.0.1", port)
    require_free("127.0.0.1", port, "--port")
    assert "pid" not in holder(port)


def test_an_address_that_is_not_this_machines_is_not_called_a_taken_port() -> None:
    with pytest.raises(
        Misconfigured, match=r"cannot listen on 192\.0\.2\.1:8101 \(.*\); choose another address or --port"
    ):
        require_free("192.0.2.1", 8101, "--port")


def test_port_zero_is_never_in_use() -> None:
    require_free("127.0.0.1", 0, "--port")


def test_a_port_is_shared_only_among_those_that_say_so() -> None:
    with bind_tcp("127.0.0.1", 0, shared=True) as first:
        first.listen()
        port = first.getsockname()[1]
        require_free("127.0.0.1", port, "--port", shared=True)
        with pytest.raises(Misconfigured, match="in use"):
            require_free("127.0.0.1", port, "--port")
        bind_tcp("127.0.0.1", port, shared=True).close()
    with bind_tcp("127.0.0.1", 0) as alone, pytest.raises(Misconfigured, match="in use"):
        require_free("127.0.0.1", alone.getsockname()[1], "--port", shared=True)


def test_the_next_free_port_passes_over_those_that_are_taken() -> None:
    sock, port = listening()
    with sock, PortClaims() as claims:
        found = claims.after("127.0.0.1", port - 1)
        assert found > port
        assert is_free("127.0.0.1", found)
        with pytest.raises(Misconfigured, match="no free TCP port"):
            claims.after("127.0.0.1", 65535)


def test_a_port_that_was_chosen_and_is_not_bound_yet_is_chosen_by_nobody_else_until_it_is_released() -> None:
    port = free_port()
    with PortClaims() as mine, PortClaims() as others:
        first = mine.after("127.0.0.1", port - 1)
        assert others.after("127.0.0.1", port - 1) > first
        assert mine.after("127.0.0.1", port - 1) not in (first, *others._held), "not even by who chose it"
        with bind_tcp("127.0.0.1", first):
            pass  # its server can bind it
        mine.release()
        assert others.after("127.0.0.1", port - 1) == first


def test_claims_end_with_the_process_that_made_them() -> None:
    port = free_port()
    code = (
        "import sys; from kvrelay.deploy.ports import PortClaims; claims = PortClaims(); "
        f"print(claims.after('127.0.0.1', {port - 1}), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child, PortClaims() as claims:
        assert child.stdout is not None
        theirs = int(child.stdout.readline())
        assert claims.after("127.0.0.1", theirs - 1) > theirs
        child.kill()
        child.wait()
        assert claims.after("127.0.0.1", theirs - 1) == theirs
