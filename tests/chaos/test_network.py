"""Members in network namespaces of their own are cut off, and nothing else is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from kvrelay.deploy.chaos.bursts import CUT_S
from kvrelay.deploy.chaos.network import NetworkVictims, why_not
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost, Misconfigured
from tests.chaos.space import FAR, HERE, NAME, SPACE, ip
from tests.patience import PATIENCE_S

ECHO = f"""
import asyncio
async def echo(reader, writer):
    while line := await reader.readline():
        writer.write(line)
async def main():
    server = await asyncio.start_server(echo, "{FAR}", 7)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture
async def member(apart: None) -> AsyncIterator[asyncio.subprocess.Process]:
    """Something in there that was started like a worker, and says what it hears."""
    command = ("ip", "netns", "exec", SPACE, sys.executable, "-c", ECHO, "kvrelay", "worker", "--name", NAME)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    yield child
    if child.returncode is None:
        child.kill()
    await child.wait()


async def says(reader: asyncio.StreamReader, within_s: float) -> bytes:
    """What comes; nothing in time is nothing."""
    try:
        async with asyncio.timeout(within_s):
            return await reader.readline()
    except TimeoutError:
        return b""


@pytest.mark.slow
async def test_a_member_is_cut_off_without_a_word_and_goes_on_where_it_was(member: asyncio.subprocess.Process) -> None:
    victims = NetworkVictims(kills=False)
    assert Target(name=NAME, kind="worker", deeds=(Deed.PARTITION, Deed.LOSS)) in await victims.targets()
    reader, writer = await asyncio.open_connection(FAR, 7)
    writer.write(b"one\n")
    assert await says(reader, PATIENCE_S) == b"one\n"
    await victims.hurt(NAME, Deed.PARTITION)
    writer.write(b"two\n")
    assert await says(reader, 0.5) == b""
    assert not reader.at_eof(), "nobody closed anything"
    await victims.mend(NAME)
    assert await says(reader, PATIENCE_S) == b"two\n", "on the same connection"
    writer.close()


@pytest.mark.slow
async def test_lost_packets_are_late_and_not_lost(member: asyncio.subprocess.Process) -> None:
    victims = NetworkVictims(kills=False)
    reader, writer = await asyncio.open_connection(FAR, 7)
    await victims.hurt(NAME, Deed.LOSS)
    writer.write(b"0\n")
    assert await says(reader, PATIENCE_S) == b"0\n", "it is not cut off"
    for number in range(1, 11):
        writer.write(b"%d\n" % number)
        await asyncio.sleep(CUT_S)
    await victims.end()  # TCP asks again more and more rarely while it is lost
    for number in range(1, 11):
        assert await says(reader, PATIENCE_S) == b"%d\n" % number
    writer.write(b"whole\n")
    assert await says(reader, PATIENCE_S) == b"whole\n"
    writer.close()


async def test_who_dies_while_cut_off_leaves_a_half_open_socket(member: asyncio.subprocess.Process) -> None:
    victims = NetworkVictims(kills=True)
    reader, writer = await asyncio.open_connection(FAR, 7)
    await victims.hurt(NAME, Deed.HALF_OPEN)
    await member.wait()
    assert await says(reader, 0.5) == b""
    assert not reader.at_eof(), "it could not say goodbye"
    await victims.end()
    assert ip("link", "show", HERE).stdout.count("UP"), "the link is there again"
    writer.close()


async def test_members_that_share_our_network_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := why_not():
        with pytest.raises(Misconfigured, match="--network"):
            NetworkVictims(kills=False)
        pytest.skip(why)
    monkeypatch.setattr("kvrelay.deploy.chaos.network.members", lambda: [("w", "worker", psutil.Process())])
    with pytest.raises(Lost, match="ip netns exec"):
        await NetworkVictims(kills=False).targets()
