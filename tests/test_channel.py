"""Links between processes: the handshake, framing, payloads, descriptors, and every way in which they break."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import xxhash

from kvrelay import channel
from kvrelay.channel import Channel, Listener, bind_tcp, bind_unix, connect, split_address
from kvrelay.errors import Lost, Malformed, Refused
from kvrelay.protocol.client import Describe, Described, Exists
from kvrelay.protocol.frame import MAX_FRAME_BYTES, WIRE_VERSION, encode
from kvrelay.protocol.handshake import Challenge, Hello, Proof, Rejected, Welcome
from kvrelay.protocol.message import Message
from kvrelay.protocol.peer import Manifest, Segments
from kvrelay.types import PageName
from tests.held_port import held_port
from tests.patience import PATIENCE_S, until

KEY = b"k" * 32
NOTHING = Manifest([], [], [])
Serve = Callable[[Channel], Awaitable[None]]


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()
    return f"{host}:{port}"


async def echo(link: Channel) -> None:
    while True:
        await link.send(await link.recv())


@contextlib.asynccontextmanager
async def listening(serve: Serve, sock: socket.socket | None = None) -> AsyncIterator[tuple[Listener, str]]:
    sock = sock or bind_tcp("127.0.0.1", 0)
    address = address_of(sock) if sock.family == socket.AF_INET else ""
    listener = Listener(sock, KEY, receiver="server", purposes={"peer", "client"}, serve=serve)
    task = asyncio.create_task(listener.run())
    try:
        yield listener, address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def dial(address: str | Path) -> Channel:
    return await connect(address, KEY, sender="me", purpose="peer")


@pytest.mark.parametrize(("host", "expected"), [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("10.0.0.7", "10.0.0.7")])
def test_a_listener_on_every_address_is_reached_through_loopback(host: str, expected: str) -> None:
    assert channel.reachable(host) == expected
    assert channel.is_everywhere(host) == (host != expected)


async def test_messages_come_back_in_order_over_tcp() -> None:
    async with listening(echo) as (_, address):
        link = await dial(address)
        for id in range(100):
            await link.send(Describe(id=id))
        assert [await link.recv() for _ in range(100)] == [Describe(id=id) for id in range(100)]
        assert (link.peer, link.purpose) == ("server", "peer")
        link.close()


async def test_a_message_of_megabytes_passes_both_ways() -> None:
    names = [PageName(os.urandom(16)) for _ in range(100_000)]
    async with listening(echo) as (_, address):
        link = await dial(address)
        await asyncio.gather(link.send(Exists(id=1, names=names)))
        assert await link.recv() == Exists(id=1, names=names)
        link.close()


@pytest.mark.parametrize("sizes", [[1], [0, 5, 0], [70_000, 3, 1_000_000], [24_576] * 900])
async def test_payloads_land_in_the_views_they_are_read_into(sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    got = [bytearray(size) for size in sizes]
    after: list[Message] = []

    async def serve(link: Channel) -> None:
        await link.recv()
        await link.recv_into([memoryview(part) for part in got])
        after.append(await link.recv())

    async with listening(serve) as (_, address):
        link = await dial(address)
        await link.send(
            Segments(transfer="t", manifest=NOTHING, payload_bytes=sum(sizes)),
            [memoryview(p) for p in parts],
        )
        await link.send(Describe(id=9))
        await until(lambda: bool(after))
        assert after == [Describe(id=9)]
        assert got == parts
        link.close()


async def test_descriptors_pass_over_a_unix_link_and_are_not_inherited(tmp_path: Path) -> None:
    memory = os.memfd_create("shared")
    os.write(memory, b"hello")

    async def serve(link: Channel) -> None:
        await link.send_fds(await link.recv(), [memory])
        await link.recv()

    async with listening(serve, bind_unix(tmp_path / "s")):
        link = await dial(tmp_path / "s")
        await link.send(Describe(id=1))
        await link.recv()
        (fd,) = link.take_fds()
        assert os.pread(fd, 5, 0) == b"hello"
        assert not os.get_inheritable(fd)
        os.close(fd)
        link.close()
    os.close(memory)


async def test_unclaimed_descriptors_are_closed_with_the_link(tmp_path: Path) -> None:
    async with listening(echo, bind_unix(tmp_path / "s")):
        link = await dial(tmp_path / "s")
        before = len(os.listdir("/proc/self/fd"))
        read, write = os.pipe()
        for id in range(20):
            with contextlib.suppress(Lost):
                await link.send_fds(Describe(id=id), [read])
        with contextlib.suppress(Lost):
            while True:
                await link.recv()
        link.close()
        os.close(read)
        os.close(write)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before - 1)


async def test_a_caller_with_the_wrong_key_gets_nothing() -> None:
    served: list[Channel] = []

    async def serve(link: Channel) -> None:
        served.append(link)

    async with listening(serve) as (listener, address):
        with pytest.raises(Refused, match="key"):
            await connect(address, b"x" * 32, sender="thief", purpose="peer")
        await until(lambda: listener.refused == 1)
    assert served == []


async def test_a_caller_that_skips_the_proof_of_the_server_still_cannot_get_in() -> None:
    async with listening(echo) as (listener, address):
        sock = socket.create_connection(split_address(address))
        raw = Channel(sock)
        await raw.send(Hello(version=WIRE_VERSION, purpose="peer", sender="thief", nonce=b"n" * 16))
        await raw.recv()
        await raw.send(Proof(proof=b"\0" * 32))
        with pytest.raises(Refused, match="key"):
            await channel.expect(raw, Welcome)
        await until(lambda: listener.refused == 1)
        raw.close()


@pytest.mark.parametrize(
    ("version", "purpose", "says"), [(99, "peer", "wire version 99"), (WIRE_VERSION, "root", "'root'")]
)
async def test_another_version_or_purpose_is_refused_by_name(version: int, purpose: str, says: str) -> None:
    async with listening(echo) as (_, address):
        raw = Channel(socket.create_connection(split_address(address)))
        await raw.send(Hello(version=version, purpose=purpose, sender="x", nonce=b"n" * 16))
        with pytest.raises(Refused, match=says):
            await channel.expect(raw, Challenge)
        raw.close()


def framed(body: bytes) -> bytes:
    """``body`` as a frame, whatever it is."""
    return (len(body) + 8).to_bytes(4, "little") + body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


NESTED = b"\x91" * 995 + b"\xc0"
"""Deeper than Python lets a decoder go, on a stack that others stand on already."""
GARBAGE = [
    framed(b"\x82\xa1x" + NESTED + b"\xa4type\xa5Hello"),
    framed(b"\x82\xa4type\xa5Hello\xa1x" + NESTED),
    framed(NESTED),
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 64,
    b"\x05\x00\x00\x00abcde",
    (1 << 20).to_bytes(4, "little") + b"x" * 100,
    encode(Describe(id=1)),
    b"",
]


async def test_bytes_that_nobody_waits_for_do_not_keep_the_loop_busy() -> None:
    link, peer = map(Channel, socket.socketpair())
    reading = asyncio.create_task(link.recv())
    await asyncio.sleep(0)
    await peer.send(Describe(id=1))
    assert await reading == Describe(id=1)
    await peer.send(Describe(id=2))
    await until(lambda: not link._is_watched)
    assert await link.recv() == Describe(id=2)
    link.close()
    peer.close()


@pytest.mark.parametrize("data", GARBAGE)
async def test_garbage_before_the_handshake_ends_that_link_alone(data: bytes) -> None:
    async with listening(echo) as (listener, address):
        good = await dial(address)
        bad = socket.create_connection(split_address(address))
        bad.sendall(data)
        bad.shutdown(socket.SHUT_WR)
        await until(lambda: listener.refused == 1)
        bad.close()
        await good.send(Describe(id=1))
        assert await good.recv() == Describe(id=1)
        assert listener.crashed == 0
        good.close()


@pytest.mark.parametrize(
    "data", [*GARBAGE[:5], framed(b"\x82\xa1x" + 9 * NESTED[:-1] + NESTED), (MAX_FRAME_BYTES + 1).to_bytes(4, "little")]
)
async def test_garbage_after_the_handshake_ends_that_link(data: bytes) -> None:
    async with listening(echo) as (listener, address):
        link = await dial(address)
        link._sock.setblocking(True)
        link._sock.sendall(data)
        link._sock.setblocking(False)
        with pytest.raises(Lost):
            await asyncio.wait_for(link.recv(), PATIENCE_S)
        await until(lambda: listener.refused == 1)
        assert listener.crashed == 0
        link.close()


async def test_an_error_of_our_own_before_the_proof_ends_that_link_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    async with listening(echo) as (listener, address):
        monkeypatch.setattr(channel, "prove", broken)
        for _ in range(channel.MAX_CRASHES):
            raw = Channel(socket.create_connection(split_address(address)))
            await raw.send(Hello(version=WIRE_VERSION, purpose="peer", sender="x", nonce=b"n" * 16))
            with pytest.raises(Lost):
                await raw.recv()
        await until(lambda: listener.refused == channel.MAX_CRASHES)
        assert listener.is_sound


async def test_a_message_longer_than_a_hello_is_refused_before_the_proof() -> None:
    async with listening(echo) as (listener, address):
        raw = Channel(socket.create_connection(split_address(address)))
        await raw.send(Hello(version=WIRE_VERSION, purpose="peer", sender="x" * 1024, nonce=b"n" * 16))
        with pytest.raises(Lost):
            await raw.recv()
        await until(lambda: listener.refused == 1)


async def test_a_silent_caller_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.1)
    async with listening(echo) as (listener, address):
        silent = socket.create_connection(split_address(address))
        await until(lambda: listener.refused == 1)
        assert silent.recv(1) == b""
        silent.close()


async def test_a_server_that_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.1)
    with bind_tcp("127.0.0.1", 0) as deaf, pytest.raises(Lost, match=r"0\.1 s"):
        await dial(address_of(deaf))


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "no-such-host.invalid"])
async def test_a_host_that_has_no_address_is_lost(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *_rest: object, **_more: object) -> None:
        host.encode("idna")  # as the real one begins
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # name servers that do not answer take longer than a handshake
    with pytest.raises(Lost, match="cannot connect"):
        await dial(f"{host}:80")


async def test_nobody_listening_is_lost(tmp_path: Path) -> None:
    with held_port() as port:
        for target in (f"127.0.0.1:{port}", tmp_path / "none", tmp_path / ("x" * 200)):
            with pytest.raises(Lost):
                await dial(target)


async def test_a_listener_at_which_too_many_wait_already_is_lost_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as first:
        stopped.bind(str(path))
        stopped.listen(0)
        first.connect(str(path))
        with pytest.raises(Lost, match=f"cannot connect to {path}"):
            await connect(path, KEY, sender="me", purpose="client")


async def test_a_peer_that_stops_reading_stalls_the_sender_until_the_limit() -> None:
    async def deaf(link: Channel) -> None:
        await asyncio.sleep(600)

    async with listening(deaf) as (_, address):
        link = await dial(address)
        chunk = memoryview(bytes(32 << 20))
        started = time.monotonic()
        message = Segments(transfer="t", manifest=NOTHING, payload_bytes=len(chunk))
        with pytest.raises(Lost, match="moved nothing"):
            await asyncio.wait_for(link.send(message, [chunk], stall_s=0.2), PATIENCE_S)
        assert time.monotonic() - started >= 0.2
        with pytest.raises(Lost):
            await link.send(Describe(id=1))


async def test_a_cancelled_send_ends_the_link_rather_than_leave_half_a_message() -> None:
    async def deaf(link: Channel) -> None:
        await asyncio.sleep(600)

    async with listening(deaf) as (_, address):
        link = await dial(address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await link.send(Describe(id=1), [memoryview(bytes(32 << 20))])
        assert "closed" in repr(link)


async def test_a_payload_that_is_cut_off_is_lost() -> None:
    ends: list[BaseException] = []

    async def serve(link: Channel) -> None:
        await link.recv()
        try:
            await link.recv_into([memoryview(bytearray(1000))])
        except Lost as error:
            ends.append(error)

    async with listening(serve) as (_, address):
        link = await dial(address)
        await link.send(Describe(id=1), [memoryview(bytes(999))])
        link.close()
        await until(lambda: bool(ends))


async def test_a_payload_that_stops_coming_is_given_up() -> None:
    async def serve(link: Channel) -> None:
        await link.recv()
        with pytest.raises(Lost, match="moved nothing"):
            await link.recv_into([memoryview(bytearray(1000))], stall_s=0.1)
        await link.send(Described(id=1, counts={}))

    async with listening(serve) as (_, address):
        link = await dial(address)
        await link.send(Describe(id=1), [memoryview(bytes(10))])
        assert await link.recv() == Described(id=1, counts={})
        link.close()


async def test_closing_a_link_wakes_the_task_that_reads_from_it() -> None:
    async with listening(echo) as (_, address):
        link = await dial(address)
        reader = asyncio.create_task(link.recv())
        await asyncio.sleep(0.05)
        link.close()
        link.close()
        with pytest.raises(Lost, match="closed here"):
            await asyncio.wait_for(reader, PATIENCE_S)


async def test_a_crash_in_our_own_code_is_counted_and_ends_that_link_alone() -> None:
    async def serve(link: Channel) -> None:
        if (await link.recv()) == Describe(id=13):
            raise ZeroDivisionError
        await link.send(Describe(id=2))

    async with listening(serve) as (listener, address):
        bad, good = await dial(address), await dial(address)
        await bad.send(Describe(id=13))
        with pytest.raises(Lost):
            await bad.recv()
        await good.send(Describe(id=1))
        assert await good.recv() == Describe(id=2)
        await until(lambda: listener.crashed == 1)
        bad.close()
        good.close()


async def test_a_caller_that_answers_where_it_should_ask_is_no_crash() -> None:
    async def serve(link: Channel) -> None:
        await channel.expect(link, Describe)

    async with listening(serve) as (listener, address):
        for code in ("Overloaded", "Refused", "nonsense"):
            link = await dial(address)
            await link.send(Rejected(code=code, reason="no"))
            with pytest.raises(Lost):
                await link.recv()
            link.close()
        assert listener.crashed == 0
        assert listener.is_sound


async def test_ending_a_listener_ends_its_links() -> None:
    async with listening(echo) as (_, address):
        link = await dial(address)
    with pytest.raises(Lost):
        await asyncio.wait_for(link.recv(), PATIENCE_S)
    link.close()


async def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind_unix(path).close()
    assert path.exists()
    with bind_unix(path):
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(OSError, match="another process listens here"):
            bind_unix(path)


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1", "host:١"])
def test_an_address_that_is_not_host_and_port_is_malformed(address: str) -> None:
    with pytest.raises(Malformed, match="host:port"):
        split_address(address)


async def test_an_http_port_is_told_apart_from_a_control_port() -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = address_of(server.sockets[0])
        with pytest.raises(Malformed, match=f"^{address}: it speaks HTTP: that is no control port"):
            await dial(address)
