"""Clients that ask a cluster again and again, and know what the answers should be: they asked before anything broke. It
must never wait for an answer without an end."""

from __future__ import annotations

import asyncio
import os
import random
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from kvrelay.deploy.chaos.stories import Stories
from kvrelay.deploy.chaos.verdict import Seen, Tally
from kvrelay.errors import Lost

_WORDS = ("the", "river", "sky", "stone", "green", "old", "quick", "light", "seven", "open", "under", "while", "night")
_MAX_EVENT_BYTES = 1 << 20
READ_BYTES = 1 << 10
"""Read ahead for one stream: who stops reading is felt soon."""


class Question(msgspec.Struct, frozen=True):
    """One prompt, and how much of an answer is wanted."""

    number: int
    text: str
    tokens: int

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """Greedy, and of an exact length where the workers can be told so."""
        asked: dict[str, Any] = {"model": model, "prompt": self.text, "max_tokens": self.tokens, "temperature": 0.0}
        return asked | {"ignore_eos": True, "stream": stream}


def questions(count: int, seed: int, *, words: tuple[int, int], tokens: tuple[int, int]) -> list[Question]:
    """Prompts of some to many words; a third of them begin alike."""
    dice = random.Random(seed)
    shared = " ".join(dice.choices(_WORDS, k=words[1] // 2))
    made = []
    for number in range(count):
        own = " ".join(dice.choices(_WORDS, k=dice.randint(*words)))
        text = f"{shared} {number} {own}" if number % 3 == 0 else f"{number} {own}"
        made.append(Question(number, text, dice.randint(*tokens)))
    return made


class Clients:
    """``streams`` at a time. Use ``learn``, then ``start`` inside of its block."""

    def __init__(self, http: aiohttp.ClientSession, url: str, asked: list[Question], *, hung_s: float) -> None:
        """``hung_s``: an answer of which nothing comes for so long hangs."""
        self._http = http
        self._url = f"{url}/v1/completions"
        self._models = f"{url}/v1/models"
        self._stories = Stories(http, url)
        self._questions = asked
        self._hung_s = hung_s
        self._answers: dict[int, str] = {}
        self._running: dict[asyncio.Task[Seen], tuple[Question, _Reading]] = {}
        self._model = ""
        self._asking: asyncio.Task[None] | None = None
        self.tally = Tally()
        self.stopped = False
        """No new request begins."""

    def __repr__(self) -> str:
        return f"<Clients {len(self._running)} running, {self.tally!r}>"

    async def learn(self) -> None:
        """What the answers are while all is well. Raises ``Lost`` when they cannot be had."""
        try:
            await self._learn()
        except aiohttp.ClientError as error:
            told = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise Lost(f"{self._url} cannot be reached ({told}); start the cluster, or name its --url") from error

    async def _learn(self) -> None:
        async with self._http.get(self._models) as response:
            body = await response.read()
        if response.status == 401:
            raise Lost(
                f"{self._models} wants an API key, or another one; give it with --api-key KEY or KVRELAY_API_KEY"
            )
        models = msgspec.json.decode(body)
        if response.status != 200 or not models["data"]:
            raise Lost(f"{self._models} names no model; wait until the cluster serves")
        self._model = models["data"][0]["id"]
        answers = await asyncio.gather(*map(self._answer, self._questions))
        self._answers = {question.number: answer for question, answer in zip(self._questions, answers, strict=True)}

    async def _answer(self, question: Question) -> str:
        async with self._http.post(self._url, json=question.body(self._model, stream=False)) as response:
            answer = await response.read()
        if response.status != 200:
            raise Lost(f"the cluster answers {response.status} before anything is broken: {_sentence(answer)}")
        text: str = msgspec.json.decode(answer)["choices"][0]["text"]
        return text

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All that was begun is answered, unless an error came first."""
        if self._asking is None:
            return
        try:
            if error is None:
                await self._asking
        finally:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def start(self, streams: int, seed: int, ramp_s: float = 0.0) -> None:
        """Ask from now on until ``stopped``; all are there after ``ramp_s``."""
        self._asking = asyncio.create_task(self._run(streams, seed, ramp_s))

    async def _run(self, streams: int, seed: int, ramp_s: float) -> None:
        dice = [random.Random(f"{seed}/{number}") for number in range(streams)]
        await asyncio.gather(*(self._client(each, ramp_s * at / streams) for at, each in enumerate(dice)))

    async def _client(self, dice: random.Random, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while not self.stopped:
            question, reading = dice.choice(self._questions), _Reading()
            task = asyncio.create_task(self._stream(question, reading))
            self._running[task] = question, reading
            try:
                await self._watch(task, reading)
                seen = msgspec.structs.replace(await task, story=reading.story, hung=reading.hung)
            except asyncio.CancelledError:
                me = asyncio.current_task()
                if me is not None and me.cancelling():
                    raise
                seen = Seen(cancelled=True)  # before it began
            finally:
                task.cancel()
                del self._running[task]
            self.tally.add(seen, self._answers[question.number], f"question {question.number}")
            if seen.status != 200:
                await asyncio.sleep(0.2)  # as its Retry-After asks for, or thereabouts

    @property
    def streams(self) -> int:
        """Requests that are underway."""
        return len(self._running)

    def cancel_one(self, dice: random.Random) -> bool:
        """One of the clients goes away; False when none is there."""
        running = self._ordered()
        if running:
            dice.choice(running).cancel()
        return bool(running)

    def slow_one(self, dice: random.Random, rests_s: float) -> bool:
        """One of the clients reads nothing for so long; False when none is there."""
        running = self._ordered()
        if running:
            self._running[dice.choice(running)][1].rest_s = rests_s
        return bool(running)

    def _ordered(self) -> list[asyncio.Task[Seen]]:
        return sorted(self._running, key=lambda task: self._running[task][0].number)

    async def _watch(self, task: asyncio.Task[Seen], reading: _Reading) -> None:
        """Until it is over. When nothing comes for too long its router is asked why, before it hears that the client
        goes away."""
        while not task.done():
            left_s = self._hung_s - reading.silent_s
            if left_s > 0:
                await asyncio.wait({task}, timeout=left_s)
            else:
                reading.hung = True
                reading.story = await self._stories.of(reading.request_id, reading.age_s)
                task.cancel()
                return

    async def _stream(self, question: Question, reading: _Reading) -> Seen:
        try:
            body, limit = question.body(self._model, stream=True), aiohttp.ClientTimeout()  # it is watched
            asked = self._http.post(self._url, json=body, timeout=limit, read_bufsize=READ_BYTES)
            async with asked as response:
                reading.status = response.status
                reading.request_id = response.headers.get("x-request-id", "")
                if response.status == 200:
                    await self._read(response, reading)
                else:
                    reading.refused(await response.content.read(_MAX_EVENT_BYTES))
        except aiohttp.ClientError:
            pass  # cut: what was read so far is judged
        except asyncio.CancelledError:
            reading.cancelled = True
        return reading.seen()

    async def _read(self, response: aiohttp.ClientResponse, reading: _Reading) -> None:
        while chunk := await response.content.readany():
            reading.take(chunk)
            await reading.pause()


class _Reading:
    """One stream as it comes in."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._asked_s = self._heard_s = self._clock()
        self._rest = b""
        self._text: list[str] = []
        self._pause_s = 0.0
        self._done = self._error = False
        self._said = ""
        self.status = 0
        self.request_id = self.story = ""
        self.hung = self.cancelled = False
        self.rest_s = 0.0
        """Nothing is read for so long, from the next piece on."""

    @property
    def age_s(self) -> float:
        return self._clock() - self._asked_s

    @property
    def silent_s(self) -> float:
        """Time since the last piece, without the time in which nothing is read on purpose."""
        return self._clock() - self._heard_s

    async def pause(self) -> None:
        """Do not read while that was asked for; that is no pause of the answer's."""
        if self.rest_s:
            rest_s, self.rest_s = self.rest_s, 0.0
            self._heard_s = self._clock() + rest_s
            await asyncio.sleep(rest_s)
            self._heard_s = self._clock()

    def take(self, chunk: bytes) -> None:
        now = self._clock()
        self._pause_s, self._heard_s = max(self._pause_s, now - self._heard_s), now
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise aiohttp.ClientPayloadError("an event without an end")
        for event in events:
            self._event(event.removeprefix(b"data: "))

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        read = msgspec.json.decode(data)
        if "error" in read:
            self._error, self._said = True, _message(read)
        for choice in read.get("choices", []):
            self._text.append(choice.get("text") or "")

    def refused(self, body: bytes) -> None:
        """It is no stream."""
        self._said = _sentence(body)

    def seen(self) -> Seen:
        return Seen(
            text="".join(self._text),
            status=self.status,
            done=self._done,
            error=self._error,
            said=self._said,
            hung=self.hung,
            story=self.story,
            cancelled=self.cancelled,
            longest_pause_s=self._pause_s,
        )


def _message(answer: Any) -> str:
    """What an error says."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else repr(answer)[:100]


def _sentence(body: bytes) -> str:
    """What the body of an error says, or its beginning."""
    try:
        return _message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return ascii(body[:100].decode(errors="replace"))
