"""Tests of deploy/ports.py."""

from __future__ import annotations

import os
import socket

import pytest

from kvrelay.channel import bind_tcp
from kvrelay.deploy.ports import free_port, holder, is_free, next_free, require_free
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
    with sock:
        found = next_free("127.0.0.1", port - 1)
    assert found > port
    assert is_free("127.0.0.1", found)
    with pytest.raises(Misconfigured, match="no free TCP port"):
        next_free("127.0.0.1", 65535)
