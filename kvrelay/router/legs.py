"""The bodies of the two legs and what P's answer says. Pure functions; the client's words reach D only."""

from __future__ import annotations

import msgspec

from kvrelay.errors import Failing, Unasked
from kvrelay.fleet.flight import DecodeOrder, PrefillOrder
from kvrelay.identity import near_salt
from kvrelay.protocol.engine import REPLAY_KEY, DecodeLeg, PrefillLeg, handoff_params
from kvrelay.router.request import ClientRequest, Kind


def prefill_body(order: PrefillOrder, model: str, ids: list[int], salt: str) -> bytes:
    """P gets token ids and nothing of the client's body: no sampling field can make a one-token prefill fail."""
    body: dict[str, object] = {
        "model": model,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "kv_transfer_params": handoff_params(PrefillLeg(transfer=order.transfer, push_to=order.push_to)),
    }
    return msgspec.json.encode(body | _salted(salt))


def local_body(request: ClientRequest, salt: str, *, journaled: bool = False) -> bytes:
    """The client's body for a worker that does everything itself; ``journaled``: the answer tells its token ids."""
    return msgspec.json.encode(request.body | _salted(salt) | _told(journaled))


def decode_body(
    request: ClientRequest, order: DecodeOrder, prompts: list[list[int]], salt: str, *, journaled: bool = False
) -> bytes:
    """The client's body with token ids instead of text, so that the prompt is tokenised once."""
    params = _loads(order)
    body = request.body | _read_with(order, salt) | {"kv_transfer_params": params} | _told(journaled)
    if keeps_text(request):
        return msgspec.json.encode(body)
    if request.kind is Kind.CHAT:
        params["prompt_token_ids"] = prompts[0]
    else:
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    return msgspec.json.encode(body)


_OF_THE_WHOLE = frozenset(
    {
        "stop", "n", "stream_options", "max_completion_tokens", "truncate_prompt_tokens", "truncation_side",
        "add_special_tokens",
    }
)  # fmt: skip
"""Fields that the rest of an answer must not obey again: the router does, or did."""

_REPLAYED_WITHOUT = _OF_THE_WHOLE - {"stop", "max_completion_tokens"}


def rest_body(
    request: ClientRequest, order: DecodeOrder, ids: list[int], salt: str, *, written: int, room_tokens: int
) -> bytes:
    """One choice from the cut on: ``ids`` are its prompt and the ``written`` tokens of its answer."""
    params = _loads(order)
    body = {key: value for key, value in request.body.items() if key not in _OF_THE_WHOLE}
    body |= (
        _read_with(order, salt)
        | _told(True)
        | {"stream": True, "max_tokens": room_tokens, "kv_transfer_params": params}
    )
    least = body.pop("min_tokens", None)
    if isinstance(least, int) and least > written:
        body["min_tokens"] = least - written
    if request.kind is Kind.CHAT:
        params["prompt_token_ids"] = ids
    else:
        body["prompt"] = ids
    return msgspec.json.encode(body)


def replay_body(
    request: ClientRequest, order: DecodeOrder, prompt: list[int], salt: str, *, written: list[int], choice: int
) -> bytes:
    """Choice number ``choice`` of a prompt once more, as it was asked; it begins with the tokens ``written``."""
    params = _loads(order)
    body = {key: value for key, value in request.body.items() if key not in _REPLAYED_WITHOUT}
    body |= _read_with(order, salt) | _told(True) | {"stream": True, "kv_transfer_params": params}
    body["vllm_xargs"] = {REPLAY_KEY: written}
    if isinstance(seed := body.get("seed"), int):
        body["seed"] = seed + choice  # so does vLLM: each choice has a generator of its own
    if request.kind is Kind.CHAT:
        params["prompt_token_ids"] = prompt
    else:
        body["prompt"] = prompt
    return msgspec.json.encode(body)


def _loads(order: DecodeOrder) -> dict[str, object]:
    """What D is to know of its pages."""
    return handoff_params(
        DecodeLeg(transfers=list(order.transfers), home=order.home, page_dtypes=list(order.page_dtypes))
    )


def _read_with(order: DecodeOrder, salt: str) -> dict[str, object]:
    """Converted pages stay with requests that take them."""
    return _salted(near_salt(salt) if order.page_dtypes else salt)


def _told(journaled: bool) -> dict[str, object]:
    return {"return_token_ids": True} if journaled else {}


def keeps_text(request: ClientRequest) -> bool:
    """Whether the answer repeats the prompt's text, which decoded ids need not give back exactly."""
    return request.has("echo") or request.has("return_prompt_text")


def _salted(salt: str) -> dict[str, object]:
    return {"cache_salt": salt} if salt else {}


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _PrefillAnswer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage = _Usage()


_FINISHED = frozenset({"stop", "length"})
"""``stop``: the first token was already the last. Anything else (abort, error) left the prompt unfinished."""


def prefill_cached_tokens(answer: bytes) -> int:
    """Tokens of the prompt that P had cached. Raises ``Failing``, ``Unasked`` when P did not finish it."""
    try:
        read = msgspec.json.decode(answer, type=_PrefillAnswer)
    except msgspec.DecodeError as error:
        raise Failing(f"a prefill worker's answer is no completion: {error}") from error
    if not read.choices or read.choices[0].finish_reason not in _FINISHED:
        raise Unasked("a prefill worker gave the prompt up")
    details = read.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0
