"""The rest of a streamed answer, written by another worker than its beginning, in the events of the first one. It must
never pass on a token that the client has, nor one after the answer's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from kvrelay.errors import KvrelayError, Lost, Malformed, Unasked
from kvrelay.policy.recover import Manner
from kvrelay.router import sse
from kvrelay.router.failures import failure
from kvrelay.router.replayed import ReplayedText
from kvrelay.router.rest import Differs, Part, RestOfText
from kvrelay.router.resumable import Remains
from kvrelay.router.stream_silence import StreamSilence
from kvrelay.router.tap import Tap
from kvrelay.router.tokens import Tokens
from kvrelay.router.upstream import Reply

log = logging.getLogger("kvrelay.router")

HELD_BLOCKS = 8
"""Blocks of each choice that are kept while the client is slow."""
_DATA = b"data: "


class Text(Protocol):
    """What a choice says from the cut on."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it, of which the second worker does not know."""

    def read(self, ids: Sequence[int], said: str, reason: str | None) -> Part | None:
        """What of an event is new; None: nothing. Raises ``Differs``."""


class RestOfChoice:
    """One choice, from the cut on."""

    def __init__(self, index: int, remains: Remains, tap: Tap, text: Text) -> None:
        self.index = index
        self._remains = remains
        self._tap = tap
        self._text = text
        self._manner = remains.manner
        """How this part of the answer goes on: what it says may ask for another manner in the next one."""
        self._log = remains.journal.choices[index]

    def __repr__(self) -> str:
        return f"<RestOfChoice {self.index}, {self._text!r}>"

    @property
    def finished(self) -> bool:
        return self._log.finished

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the choice, of which the second worker does not know."""
        return self._text.stopped_by is not None

    def take(self, block: bytes) -> bytes:
        """Events of the second worker as the client gets them. Raises ``Lost``, ``Malformed``."""
        return b"".join(map(self._event, filter(None, block.split(sse.END))))

    def _event(self, data: bytes) -> bytes:
        event = data + sse.END
        if self.finished or event == sse.DONE:
            return b""
        if sse.has_error(event):
            raise failure(sse.error_status(event) or 500)
        try:
            read: dict[str, Any] = msgspec.json.decode(data.removeprefix(_DATA))
            choices = read["choices"]
            return self._chunk(read, choices[0]) if choices else b""
        except (msgspec.DecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise Malformed(f"a worker's event cannot be read: {error}") from error

    def _chunk(self, event: dict[str, Any], choice: dict[str, Any]) -> bytes:
        ids, reason = choice.get("token_ids") or [], choice.get("finish_reason")
        if reason in ("abort", "error"):
            raise Unasked("the worker gave the rest of an answer up")
        is_opening = _is_opening(choice)
        if is_opening and self._log.begun:
            return b""
        if self._manner is Manner.CONTINUE and not _is_plain(choice):
            raise Differs("the rest of an answer is more than text, and its beginning was taken for text alone")
        part = Part(0, 0, "") if is_opening else self._text.read(ids, _said(choice), reason)
        if part is None:
            return b""
        if self._text.stopped_by is not None:
            choice |= {"finish_reason": "stop", "stop_reason": self._text.stopped_by}
        _say(choice, part)
        self._trim(choice.get("logprobs"), part)
        new_ids = ids[part.begin : part.end]
        self._hide_ids(event, choice, new_ids)
        finished = choice.get("finish_reason") is not None
        self._remains.journal.wrote(self.index, new_ids, part.text, finished, plain=_is_plain(choice))
        return self._dressed(event, choice)

    def _trim(self, logprobs: dict[str, Any] | None, part: Part) -> None:
        """Keep the log probabilities of the tokens that the client gets, with their offsets in the whole answer."""
        for key, values in (logprobs or {}).items():
            if isinstance(values, list) and logprobs is not None:
                logprobs[key] = values[part.begin : part.end]
        if logprobs and "text_offset" in logprobs:
            logprobs["text_offset"] = self._log.place(logprobs["tokens"])

    def _hide_ids(self, event: dict[str, Any], choice: dict[str, Any], new_ids: list[int]) -> None:
        """Remove token ids that the client did not ask for. Ids of the prompt are sent before the first token of a
        choice."""
        if "token_ids" in choice:
            choice["token_ids"] = new_ids if self._tap.keeps_ids else None
        if not self._tap.keeps_ids or self._log.begun:
            for told in (event, choice):
                told |= {"prompt_token_ids": None} if "prompt_token_ids" in told else {}

    def _dressed(self, event: dict[str, Any], choice: dict[str, Any]) -> bytes:
        """The event with id, time and model of the first worker's events."""
        head = self._tap.head
        choice["index"] = self.index
        event |= {"id": head.id, "created": head.created, "model": head.model, "choices": [choice]}
        if self._remains.wants_running_usage:
            event["usage"] = self._running_usage()
        return _DATA + msgspec.json.encode(event) + sse.END

    def _running_usage(self) -> dict[str, int]:
        prompt, written = len(self._remains.prompts[self._log.prompt]), len(self._log.ids)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _is_opening(choice: dict[str, Any]) -> bool:
    """A chat's first event, which tells the role and nothing else."""
    is_silent = not choice.get("token_ids") and choice.get("finish_reason") is None and not _said(choice)
    return choice.get("delta") is not None and is_silent and _is_plain(choice)


def _is_plain(choice: dict[str, Any]) -> bool:
    """Its delta is text and nothing else."""
    delta = choice.get("delta") or {}
    return not any(value for key, value in delta.items() if key not in ("content", "role"))


def _said(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    return (choice.get("text") if delta is None else delta.get("content")) or ""


def _say(choice: dict[str, Any], part: Part) -> None:
    """Raises ``Differs`` where half of an event is known to the client and it is more than text."""
    if part.begin and not _is_plain(choice):
        raise Differs("a worker cut a tool call or its reasoning into other pieces than the one before it")
    if choice.get("delta") is None:
        choice["text"] = part.text
    elif part.text or "content" in choice["delta"]:
        choice["delta"]["content"] = part.text


async def rests_of(remains: Remains, tap: Tap, tokens: Tokens) -> list[RestOfChoice]:
    """All choices that are still open, up to the cut; none when one of them cannot go on."""
    journal = tap.journal  # with all that was taken
    if not remains.can_go_on:
        return []
    try:
        return [await _rest_of(index, remains, tap, tokens) for index in journal.open]
    except Malformed:
        return []


async def _rest_of(index: int, remains: Remains, tap: Tap, tokens: Tokens) -> RestOfChoice:
    """Raises ``Malformed`` when the tokens of choice ``index`` do not make the text that was sent."""
    log = remains.journal.choices[index]
    sent = log.sent()  # its first worker may write on while the text is decoded
    if remains.manner is Manner.REPLAY:
        return RestOfChoice(index, remains, tap, ReplayedText(sent))
    skip = remains.request.body.get("skip_special_tokens") is not False
    decoder, text = await tokens.text_after(remains.prompts[log.prompt], sent.ids, skip_special=skip)
    if not sent.matches(text):
        raise Malformed("the tokens of an answer do not make the text that was sent")
    rest = RestOfText(decoder.step, remains.rules, text=text, tokens=len(sent.ids), sent_chars=sent.chars)
    return RestOfChoice(index, remains, tap, rest)


News = tuple[RestOfChoice, Reply, bytes | KvrelayError]


class Continuation:
    """All choices that are still open, each from a reply of its own."""

    def __init__(self, legs: Sequence[tuple[RestOfChoice, Reply]], silence: StreamSilence) -> None:
        self._legs = legs
        self._silence = silence
        self._news: asyncio.Queue[News] = asyncio.Queue(HELD_BLOCKS * len(legs))
        self._readers: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Continuation of {len(self._legs)} choices>"

    async def blocks(self) -> AsyncIterator[bytes]:
        """Events until every choice has come to its end. Raises ``Lost``, ``Malformed``."""
        self._readers = [asyncio.create_task(self._read(rest, reply)) for rest, reply in self._legs]
        begin, end = self._silence.begin, self._silence.end  # of the first word: its prompt is computed meanwhile
        while not all(rest.finished for rest, _ in self._legs):
            begin()
            rest, reply, news = await self._news.get()
            end()
            begin, end = self._silence.again, self._silence.heard
            if rest.finished:
                continue
            if isinstance(news, KvrelayError):
                raise news
            block = rest.take(news)
            if rest.stopped:
                reply.close()
            if block:
                yield block

    async def _read(self, rest: RestOfChoice, reply: Reply) -> None:
        try:
            async for block in reply.events():
                await self._news.put((rest, reply, block))
            await self._news.put((rest, reply, Lost("a worker ended its stream before the answer's end")))
        except KvrelayError as error:
            await self._news.put((rest, reply, error))
        except Exception:  # border: whatever ends a reader must end the wait for its news
            log.exception("reading the rest of an answer failed")
            await self._news.put((rest, reply, Lost("the rest of an answer could not be read")))

    def close(self) -> None:
        """Hang up, which ends what a stop string made needless."""
        for task in self._readers:
            task.cancel()
        for _, reply in self._legs:
            reply.close()
