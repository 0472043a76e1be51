"""What a stream in a recovery benchmark counts as."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from benchmarks.breaking.asking import Asking, Stream
from benchmarks.breaking.loss import Loss, spread, table
from benchmarks.breaking.stages import STAGES
from benchmarks.breaking.underway import Load
from benchmarks.breaking.wires import Wire, cut
from tests.patience import until


def test_a_pause_is_the_longest_time_between_two_tokens() -> None:
    assert Stream(tokens=[1, 2, 3], came_s=[1.0, 1.5, 3.0]).longest_pause_s == 1.5
    assert Stream().longest_pause_s == 0.0


def test_figures_say_their_worst() -> None:
    assert spread([0.3, 0.1, 0.2]) == {"median": 0.2, "worst": 0.3, "count": 3}


def test_every_stage_says_what_it_breaks() -> None:
    assert all(stage.__doc__ for stage in STAGES.values())


def lost(at_s: float, pause_s: float, tokens: list[int]) -> Loss:
    """A stream asked for at 100 s, which the router received at 100.25 s, of a prompt of 50 tokens; hurt at 101 s."""
    stream = Stream(tokens=tokens, came_s=[100.5, 100.5 + pause_s], asked_s=100.0, done=True)
    lost = {"lost_at": at_s, "tokens": 7, "cached_tokens": 40}
    stream.timeline = {"events": {"first_token": 0.25}, "resumptions": [lost]}
    return Loss.of(stream, prompt_tokens=50, hurt_s=101.0, ttft_s=0.8, right=Stream(tokens=[1, 2]))


def test_what_a_recovery_takes_begins_when_the_loss_is_noticed() -> None:
    loss = lost(at_s=2.75, pause_s=2.75, tokens=[1, 2])
    assert (loss.detection_s, loss.beyond_s) == (2.0, 0.75)
    assert loss.written_tokens == 57


def test_an_answer_that_differs_is_no_recovery() -> None:
    told = table([lost(1.75, 1.0, [1, 2]), lost(1.75, 1.5, [1, 3])], restored=False)
    assert (told["streams"], told["equal"]) == (2, 1)
    assert told["beyond_detection_s"]["worst"] == 0.5
    assert told["allowed_beyond_s"] == 1.04


class Echo:
    """Knows that an answer counts from 0."""

    def answer(self, prompt: list[int], count: int) -> list[int]:
        return list(range(count))


class Answered(Asking):
    """Clients whose next answers are known; the last one ends their asking."""

    def __init__(self, streams: list[Stream], stop: asyncio.Event) -> None:
        self._streams = streams
        self._stop = stop

    def prompt(self, tokens: int) -> list[int]:
        return [1] * tokens

    async def stream(self, prompt: list[int], count: int, stream: Stream | None = None) -> Stream:
        if len(self._streams) == 1:
            self._stop.set()
        return self._streams.pop()


async def test_an_answer_of_the_right_length_and_of_other_tokens_counts_as_wrong() -> None:
    right, cut_off = Stream(tokens=[0, 1, 2], done=True), Stream(tokens=[0, 1])
    other, ended = Stream(tokens=[0, 1, 1], done=True), Stream(tokens=[0, 1, 2], done=True, error=True)
    stop, counts = asyncio.Event(), {"answered": 0, "wrong": 0, "failed": 0}
    await Answered([right, cut_off, other, ended], stop).keep_asking(stop, counts, 5, 3, Echo())
    assert counts == {"answered": 1, "wrong": 1, "failed": 2}


class Disturbed(Asking):
    """Clients whose next answers are known; the others, and all that are asked for afterwards, are 0, 1."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        """An empty one is none at all."""

    def prompt(self, tokens: int) -> list[int]:
        return [1] * tokens

    async def stream(self, prompt: list[int], count: int, stream: Stream | None = None) -> Stream:
        await asyncio.sleep(0)
        told = self.answers.pop() if stream is not None and self.answers else [0, 1]
        if not told:
            raise aiohttp.ServerDisconnectedError
        stream = stream or Stream()
        stream.tokens, stream.done = told, True
        return stream


async def test_answers_under_load_are_compared_with_those_at_rest() -> None:
    site = Disturbed([[0, 2], [], [0, 1, 1], [0, 1]])
    load = Load(site)
    async with load.asking():
        await until(lambda: not site.answers)
    counts = await load.counts()
    assert (counts["wrong"], counts["failed"]) == (2, 1)
    assert counts["answered"] == len(load.asked) - 3 > 0


@pytest.mark.parametrize("begun", [True, False], ids=["a connection that was there", "a new one"])
async def test_over_a_wire_that_is_cut_nothing_comes_until_it_is_whole_again(begun: bool) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        wire = Wire(f"127.0.0.1:{port}")
        reader, writer = await asyncio.open_connection(*wire.address.split(":"))
        if begun:
            writer.write(b"before ")
            assert await reader.readexactly(7) == b"before "
        with cut([wire]):
            writer.write(b"meanwhile")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await reader.read(1)
        assert await reader.readexactly(9) == b"meanwhile"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await wire.close()


async def test_who_dials_a_wire_to_nobody_is_hung_up_on() -> None:
    wire = Wire("127.0.0.1:9")
    reader, writer = await asyncio.open_connection(*wire.address.split(":"))
    assert await reader.read() == b""
    writer.close()
    await wire.close()
