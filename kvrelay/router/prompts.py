"""Turns a request into token ids, once. It must never guess: what it does not render exactly as a worker would, a
worker renders, or the request stays whole."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.errors import Lost, Malformed
from kvrelay.fleet.chooser import MAX_SPLIT_PROMPTS
from kvrelay.policy.patience import RENDER_TRIES
from kvrelay.policy.whole import WholeReason
from kvrelay.router.render import Rendered, Renderer, Trust
from kvrelay.router.request import ClientRequest, Kind
from kvrelay.router.strip import CONTENT
from kvrelay.router.tokens import Tokens
from kvrelay.types import WorkerInfo

_PLAIN_CHAT = frozenset(
    {
        "messages", "model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
        "max_completion_tokens", "n", "presence_penalty", "seed", "stop", "stream", "stream_options", "temperature",
        "top_p", "user", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output",
        "ignore_eos", "min_tokens", "skip_special_tokens", "return_token_ids", "vllm_xargs", "store", "metadata",
        "service_tier", "request_id", "session_id", "priority",
    }
)  # fmt: skip
"""Fields that do not change how a chat is rendered. Any other one that is set makes it the worker's to render."""
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})
_TOKENISING = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")
"""Fields of a completion that change its ids."""
_BILLING_HEADER = "x-anthropic-billing-header"
"""System messages that start so are cut by the engine."""
BYTES_PER_TOKEN = 4
"""Rough guess for prompts that are not tokenised here. No token has less than a byte: all bytes are surely enough."""


@dataclass(frozen=True)
class Prompts:
    """Token ids of each prompt, or the reason why the request has to stay whole."""

    ids: list[list[int]]
    whole: WholeReason | None = None
    lengths: tuple[int, ...] = field(default=())


class PromptReader:
    """Reads prompts of requests."""

    def __init__(self, tokens: Tokens, renderer: Renderer, *, kv_routing: bool = True) -> None:
        self._tokens = tokens
        self._renderer = renderer
        self._kv_routing = kv_routing

    def __repr__(self) -> str:
        return f"<PromptReader {self._renderer!r}>"

    async def read(self, request: ClientRequest, workers: Sequence[WorkerInfo], context_tokens: int) -> Prompts:
        """Prompts of ``request``; ``workers`` of its model, which take up to ``context_tokens``, render where needed.
        Raises ``BadRequest``, ``Rejected``."""
        reason = whole_reason(request) if self._kv_routing else WholeReason.NO_KV_ROUTING
        if not reason and not may_fit(request, context_tokens, self._tokens):
            # Surely over the context length. A worker says so faster, and better, than tokenising here would.
            reason = WholeReason.OVER_LENGTH
        if reason:
            return _whole(request, reason)
        own = await self._own(request, workers[0].model)
        ids = own if own is not None else await self._rendered(request, workers)
        if isinstance(ids, WholeReason):
            return _whole(request, ids)
        if not all(ids):
            return _whole(request, WholeReason.EMPTY_PROMPT)
        return Prompts(ids=ids, lengths=tuple(map(len, ids)))

    async def _own(self, request: ClientRequest, model: str) -> list[list[int]] | None:
        """Ids rendered here; None when only a worker can."""
        trusted = self._renderer.trust(model, request.kind) is Trust.CHECKED
        if request.kind is Kind.CHAT:
            return await self._own_chat(request) if trusted else None
        if any(request.body.get(key) is not None for key in _TOKENISING):
            return None
        ids, texts = _sorted_out(request.prompts)
        if texts:
            return await self._tokens.encode_all(texts, special=True) if trusted else None
        return ids

    async def _own_chat(self, request: ClientRequest) -> list[list[int]] | None:
        messages = plain_messages(request.body)
        if messages is None:
            return None
        try:
            return [await self._tokens.encode_chat(messages)]
        except Malformed:
            return None

    async def _rendered(self, request: ClientRequest, workers: Sequence[WorkerInfo]) -> list[list[int]] | WholeReason:
        """Ids rendered by a worker, or the reason why there are none."""
        if self._renderer.trust(workers[0].model, request.kind) is Trust.UNCHECKED:
            return WholeReason.NO_RENDER
        rendered: list[Rendered] | None = None
        for worker in _longest_first(request, workers)[:RENDER_TRIES]:
            with contextlib.suppress(Lost):
                rendered = await self._renderer.render(request, worker)
                break
        if rendered is None:
            return WholeReason.NO_RENDER
        if any(entry.features is not None for entry in rendered):
            return WholeReason.MULTIMODAL
        return [entry.token_ids for entry in rendered]


def may_fit(request: ClientRequest, context_tokens: int, tokens: Tokens) -> bool:
    """Whether no prompt of ``request`` is surely over a context of so many tokens."""
    limit = context_tokens * tokens.max_chars_per_token
    if request.kind is Kind.COMPLETION:
        return all(len(prompt) <= limit for prompt in request.prompts)
    return _chat_chars(request.body["messages"]) <= limit


def _longest_first(request: ClientRequest, workers: Sequence[WorkerInfo]) -> Sequence[WorkerInfo]:
    """Workers that may render the request, in the order to ask them: those with the longest context first, where it may
    be too long for some."""
    # No token has less than a byte.
    most_tokens = BYTES_PER_TOKEN * sum(_guess_lengths(request)) + (request.max_tokens or 0)
    if most_tokens <= min(worker.engine.max_model_len for worker in workers):
        return workers
    return sorted(workers, key=lambda worker: -worker.engine.max_model_len)


def whole_reason(request: ClientRequest) -> WholeReason | None:
    """Why a request gains nothing from a split or cannot be split; None when it can. Raises ``BadRequest``."""
    body = request.body
    if body.get("prompt_logprobs") is not None:
        return WholeReason.PROMPT_LOGPROBS
    if request.has("use_beam_search"):
        return WholeReason.BEAM_SEARCH
    if request.kind is Kind.CHAT:
        return None
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_SPLIT_PROMPTS and not isinstance(prompt[0], int):
        return WholeReason.MANY_PROMPTS
    if request.has("echo") and body.get("logprobs") is not None:
        return WholeReason.ECHO_LOGPROBS
    for key in (WholeReason.PROMPT_EMBEDS, WholeReason.SUFFIX):
        if body.get(key) is not None:
            return key
    return WholeReason.EMPTY_PROMPT if prompt in ("", [], [""], [[]]) else None


def plain_messages(body: dict[str, object]) -> list[dict[str, str]] | None:
    """The messages of a chat that is rendered here; None when anything about it is unusual."""
    if any(value is not None for key, value in body.items() if key not in _PLAIN_CHAT):
        return None
    messages = body["messages"]
    if not isinstance(messages, list) or not all(map(_is_plain, messages)):
        return None
    return messages


def _is_plain(message: object) -> bool:
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        return False
    role, content = message["role"], message["content"]
    return role in _PLAIN_ROLES and isinstance(content, str) and not content.startswith(_BILLING_HEADER)


def _chat_chars(messages: object) -> int:
    """Characters of all plain contents."""
    if not isinstance(messages, list):
        return 0
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return sum(len(content) for content in contents if isinstance(content, str))


def _sorted_out(prompts: list[str] | list[list[int]]) -> tuple[list[list[int]], list[str]]:
    """Prompts that are token ids, and those that are texts: one of both is empty."""
    ids = [prompt for prompt in prompts if isinstance(prompt, list)]
    return ids, [prompt for prompt in prompts if isinstance(prompt, str)]


def _whole(request: ClientRequest, reason: WholeReason) -> Prompts:
    return Prompts(ids=[], whole=reason, lengths=_guess_lengths(request))


def _guess_lengths(request: ClientRequest) -> tuple[int, ...]:
    if request.kind is Kind.CHAT:
        return (sum(_guess_tokens(request.body[key]) for key in CONTENT & request.body.keys()),)
    source = request.body.get("prompt")
    if isinstance(source, list) and source and not isinstance(source[0], int):
        return tuple(map(_guess_tokens, source))
    return (_guess_tokens(source),)


def _guess_tokens(source: object) -> int:
    if isinstance(source, str):
        size_bytes = len(source) if source.isascii() else len(source.encode(errors="surrogatepass"))
        return 1 + size_bytes // BYTES_PER_TOKEN
    if isinstance(source, dict):
        return sum(map(_guess_tokens, (*source, *source.values())))
    if isinstance(source, list):
        return len(source) if source and isinstance(source[0], int) else sum(map(_guess_tokens, source))
    return 1
