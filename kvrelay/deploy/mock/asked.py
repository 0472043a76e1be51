"""What a mock worker reads of a request's body. It must never refuse what vLLM takes."""

from __future__ import annotations

import msgspec

from kvrelay.errors import BadRequest, Malformed
from kvrelay.protocol.engine import HANDOFF_KEY, Handoff, read_handoff

COMPLETION_TOKENS = 16
"""OpenAI's default ``max_tokens`` of a completion; a chat may fill the context."""
MAX_TEMPERATURE = 2.0
"""vLLM's."""
MAX_SEQUENCES = 4096
"""Prompts times choices of one request."""


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options`` of a request for a streamed answer."""

    include_usage: bool = False


class TransferParams(msgspec.Struct, frozen=True):
    """``kv_transfer_params`` as the router sends them."""

    kvrelay: object = None
    prompt_token_ids: list[int] | None = None


class Body(msgspec.Struct, frozen=True):
    """The fields of both APIs that make a difference here. Answers follow from prompts, so of sampling only
    what vLLM would refuse makes one."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: list[dict[str, object]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    logprobs: int | bool | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    cache_salt: str | None = None
    kv_transfer_params: TransferParams | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def limit_tokens(self) -> int | None:
        """Most tokens that the client wants of each answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    def leg(self) -> Handoff | None:
        """The router's orders, if there are any. Raises ``Malformed``."""
        params = self.kv_transfer_params
        return read_handoff({HANDOFF_KEY: params.kvrelay}) if params is not None and params.kvrelay else None


_reader = msgspec.json.Decoder(Body)
_ids = msgspec.json.Decoder(list[int])
_many = msgspec.json.Decoder(str | list[str | list[int]])


def read_body(data: bytes) -> Body:
    """Raises ``BadRequest``."""
    try:
        body = _reader.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read: {error}") from error
    if not 1 <= body.choices <= MAX_SEQUENCES:
        raise BadRequest(f"n must be between 1 and {MAX_SEQUENCES}", param="n")
    if body.temperature is not None and not 0.0 <= body.temperature <= MAX_TEMPERATURE:
        raise BadRequest(f"temperature must be in [0, 2], got {body.temperature}.", param="temperature")
    return body


def prompts_of(body: Body) -> list[str | list[int]]:
    """The prompts of a completion. Raises ``BadRequest``."""
    try:
        return [_ids.decode(body.prompt)]  # first: it is what routers send, and may be long
    except msgspec.DecodeError:
        pass
    try:
        prompts = _many.decode(body.prompt)
    except msgspec.DecodeError as error:
        raise BadRequest(f"prompt cannot be read: {error}", param="prompt") from error
    return [prompts] if isinstance(prompts, str) else list(prompts)


def plain_chat(body: Body) -> list[dict[str, str]]:
    """Messages whose contents are texts. Raises ``Malformed``."""
    return [{"role": str(each.get("role", "")), "content": _text(each.get("content"))} for each in body.messages]


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    raise Malformed("a message's content is neither text nor a list of parts")
