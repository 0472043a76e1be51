"""A mock worker's answers as bytes, in the shape of vLLM 0.32's: one class for each API. No I/O happens here."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol

import msgspec

from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.deploy.mock.vocabulary import Vocabulary
from kvrelay.protocol.engine import HANDOFF_KEY
from kvrelay.types import Value

DONE = b"data: [DONE]\n\n"
_LOGPROB = -0.5
"""Log probability of every token: a mock has no distribution."""
GARBAGE = {HANDOFF_KEY: {"type": "Nonsense", "transfer": 17}}

_encode = msgspec.json.Encoder().encode


class Style(Value, frozen=True, kw_only=True):
    """What all events of one answer have in common."""

    id: str
    created: int
    model: str
    token_ids: bool
    logprobs: bool
    garbage: bool = False
    """``kv_transfer_params`` that nobody can read."""

    def params(self) -> dict[str, Any] | None:
        return GARBAGE if self.garbage else None


class Shape(Protocol):
    """The bytes of one API's answers, streamed and whole."""

    def first(self, index: int, sequence: Sequence) -> bytes:
        """Events before the first token of an answer."""

    def token(self, index: int, sequence: Sequence, token: int) -> bytes:
        """The event of one token; that of the last one says why the answer ends."""

    def usage(self, sequences: Many[Sequence]) -> bytes:
        """The event with the usage."""

    def whole(self, sequences: Many[Sequence]) -> bytes:
        """An answer that is not streamed."""


def usage_of(sequences: Many[Sequence], choices: int) -> dict[str, Any]:
    """vLLM's usage; each prompt counts once, however many answers it gets."""
    prompts = sequences[::choices]
    prompt, written = sum(each.prompt_tokens for each in prompts), sum(each.written for each in sequences)
    cached = sum(min(each.cached_tokens, each.prompt_tokens) for each in prompts)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + written,
        "completion_tokens": written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class CompletionShape:
    """The shape of answers to ``/v1/completions``."""

    def __init__(self, style: Style, vocabulary: Vocabulary, choices: int) -> None:
        self._style = style
        self._vocabulary = vocabulary
        self._choices = choices
        self._base = {"id": style.id, "object": "text_completion", "created": style.created, "model": style.model}
        self._head = b"data: " + _encode(self._base)[:-1] + b',"choices":['

    def __repr__(self) -> str:
        return f"<CompletionShape {self._style.id}>"

    def first(self, index: int, sequence: Sequence) -> bytes:
        return b""

    def token(self, index: int, sequence: Sequence, token: int) -> bytes:
        choice = self._choice(index, [token], sequence.ending)
        if self._style.token_ids and sequence.written == 1:
            choice["prompt_token_ids"] = sequence.tokens[: sequence.prompt_tokens]
        return self._head + _encode(choice) + b"]}\n\n"

    def _choice(self, index: int, tokens: list[int], ending: str | None) -> dict[str, Any]:
        texts = [self._vocabulary.text(token) for token in tokens]
        choice: dict[str, Any] = {"index": index, "text": "".join(texts), "logprobs": None, "finish_reason": ending}
        if self._style.logprobs:
            choice["logprobs"] = _completion_logprobs(texts)
        if self._style.token_ids:
            choice["token_ids"] = tokens
        return choice | {"stop_reason": None}

    def usage(self, sequences: Many[Sequence]) -> bytes:
        return self._head + b'],"usage":' + _encode(usage_of(sequences, self._choices)) + b"}\n\n"

    def whole(self, sequences: Many[Sequence]) -> bytes:
        choices = [self._choice(at, each.output, each.ending) for at, each in enumerate(sequences)]
        if self._style.token_ids:
            for choice, each in zip(choices, sequences, strict=True):
                choice["prompt_token_ids"] = each.tokens[: each.prompt_tokens]
        more = {"usage": usage_of(sequences, self._choices), "kv_transfer_params": self._style.params()}
        return _encode({**self._base, "choices": choices, **more})


class ChatShape:
    """The shape of answers to ``/v1/chat/completions``."""

    def __init__(self, style: Style, vocabulary: Vocabulary, choices: int) -> None:
        self._style = style
        self._vocabulary = vocabulary
        self._choices = choices
        chunk = {"id": style.id, "object": "chat.completion.chunk", "created": style.created, "model": style.model}
        self._head = b"data: " + _encode(chunk)[:-1] + b',"choices":['

    def __repr__(self) -> str:
        return f"<ChatShape {self._style.id}>"

    def first(self, index: int, sequence: Sequence) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        tail = b"]"
        if self._style.token_ids:
            tail += b',"prompt_token_ids":' + _encode(sequence.tokens[: sequence.prompt_tokens])
        return self._head + _encode(choice) + tail + b"}\n\n"

    def token(self, index: int, sequence: Sequence, token: int) -> bytes:
        choice = {"index": index, "delta": {"content": self._vocabulary.text(token)}}
        return self._head + _encode(choice | self._end([token], sequence.ending)) + b"]}\n\n"

    def _end(self, tokens: list[int], ending: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._style.logprobs else None
        end = {"logprobs": logprobs, "finish_reason": ending, "stop_reason": None}
        return end | ({"token_ids": tokens} if self._style.token_ids else {})

    def _logprobs(self, tokens: list[int]) -> dict[str, Any]:
        texts = [self._vocabulary.text(token) for token in tokens]
        same = {"logprob": _LOGPROB, "top_logprobs": []}
        return {"content": [{"token": text, "bytes": list(text.encode()), **same} for text in texts]}

    def usage(self, sequences: Many[Sequence]) -> bytes:
        return self._head + b'],"usage":' + _encode(usage_of(sequences, self._choices)) + b"}\n\n"

    def whole(self, sequences: Many[Sequence]) -> bytes:
        choices = []
        for index, each in enumerate(sequences):
            text = "".join(map(self._vocabulary.text, each.output))
            message = {"role": "assistant", "content": text}
            choices.append({"index": index, "message": message} | self._end(each.output, each.ending))
        answer: dict[str, Any] = {"id": self._style.id, "object": "chat.completion", "created": self._style.created}
        answer |= {"model": self._style.model, "choices": choices, "usage": usage_of(sequences, self._choices)}
        if self._style.token_ids:
            answer["prompt_token_ids"] = sequences[0].tokens[: sequences[0].prompt_tokens]
        return _encode(answer | {"kv_transfer_params": self._style.params()})


def _completion_logprobs(texts: list[str]) -> dict[str, Any]:
    offsets = [sum(map(len, texts[:at])) for at in range(len(texts))]
    return {
        "text_offset": offsets,
        "token_logprobs": [_LOGPROB] * len(texts),
        "tokens": texts,
        "top_logprobs": [{text: _LOGPROB} for text in texts],
    }
