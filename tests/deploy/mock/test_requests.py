"""Tests of what mock workers read and write: bodies, faults, names, words, answers in vLLM's shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.deploy.mock.answer import ChatShape, CompletionShape, Shape, Style
from kvrelay.deploy.mock.asked import plain_chat, prompts_of, read_body
from kvrelay.deploy.mock.faults import Faults, Params, parse
from kvrelay.deploy.mock.intake import Intake
from kvrelay.deploy.mock.roster import mock_names, parse_size
from kvrelay.deploy.mock.sequence import Ending, Sequence
from kvrelay.deploy.mock.vocabulary import Vocabulary, vocabulary_of
from kvrelay.errors import BadRequest, Misconfigured
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg, handoff_params
from kvrelay.router import sse
from kvrelay.types import Role
from tests.deploy.mock.values import sequence
from tests.fleet.values import engine

# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("hi", ["hi"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_in_four_forms(prompt: Any, read: list[Any]) -> None:
    assert prompts_of(read_body(json.dumps({"prompt": prompt}).encode())) == read


@pytest.mark.parametrize("prompt", [None, 3, {}, [1, "a"], [[1.5]]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest):
        prompts_of(read_body(json.dumps({"prompt": prompt}).encode()))


@pytest.mark.parametrize("data", [b"", b"[]", b'{"n": 0}', b'{"n": 100000}', b'{"max_tokens": "many"}'])
def test_a_body_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        read_body(data)


@pytest.mark.parametrize("leg", [PrefillLeg(transfer="t", push_to=None), DecodeLeg(transfers=["t"], home="h:1")])
def test_the_routers_orders_are_read(leg: PrefillLeg | DecodeLeg) -> None:
    body = read_body(json.dumps({"kv_transfer_params": handoff_params(leg) | {"prompt_token_ids": [1, 2]}}).encode())
    assert body.leg() == leg
    assert body.kv_transfer_params is not None
    assert body.kv_transfer_params.prompt_token_ids == [1, 2]


def test_contents_in_parts_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read_body(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
    assert plain_chat(body) == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize("temperature", [-1, 2.5])
def test_a_temperature_that_vllm_refuses_is_refused(temperature: float) -> None:
    with pytest.raises(BadRequest, match=r"temperature must be in \[0, 2\]"):
        read_body(json.dumps({"temperature": temperature}).encode())
    assert read_body(b'{"temperature": 2}').temperature == 2


@pytest.mark.parametrize("param", ["max_tokens", "max_completion_tokens"])
async def test_more_tokens_than_the_model_has_room_for_at_all_are_refused_and_fewer_are_cut(param: str) -> None:
    unused: Any = None
    intake = Intake(unused, engine(max_model_len=64), "tiny")

    async def most(tokens: int) -> int:
        body = read_body(json.dumps({"prompt": [5, 6], param: tokens}).encode())
        return (await intake.sequences(body, "r", None, chat=False))[0].max_tokens

    assert (await most(64), await most(7)) == (62, 7)
    with pytest.raises(BadRequest, match=f"^{param}=65 cannot be greater than max_model_len=64"):
        await most(65)


# ---------------------------------------------------------------- faults and names


def test_faults_are_read_as_they_are_typed() -> None:
    assert parse("") == Faults()
    assert parse("hang,slow=3") == Faults(hang=True, slow=3.0)
    assert parse("drop_after=0, params=garbage") == Faults(drop_after=0, params=Params.GARBAGE)


@pytest.mark.parametrize("text", ["hung", "slow=0", "status=999", "params=odd", "lose_events=-1"])
def test_a_fault_that_is_none_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(Misconfigured, match="known are hang, dead, slow"):
        parse(text)


def test_mock_members_are_called_as_real_ones() -> None:
    names = mock_names(*parse_size("--mock", "2x1"), 1, stores=2)
    assert names.stores == ("store-0", "store-1")
    assert [(each.name, each.role, each.store) for each in names.workers] == [
        ("prefill-0", Role.PREFILL, 0),
        ("prefill-1", Role.PREFILL, 0),
        ("decode-0", Role.DECODE, 1),
        ("both-0", Role.BOTH, 0),
    ]
    assert [each.faults.hang for each in names.plans({"decode-0": Faults(hang=True)})] == [False, False, True, False]
    with pytest.raises(Misconfigured, match="no mock worker is called decode-1"):
        names.plans({"decode-1": Faults()})


@pytest.mark.parametrize("size", ["16", "16x", "axb", "1x1x1", "-1x1"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(Misconfigured, match="PxD"):
        parse_size("--mock", size)


@pytest.mark.parametrize("size", [(0, 0), (300, 1)])
def test_no_workers_or_far_too_many_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(Misconfigured, match="1 to 256 workers"):
        mock_names(*size, 0, stores=1)


# ---------------------------------------------------------------- words


def test_words_are_tokens_whose_text_needs_no_neighbour() -> None:
    texts = ["at", "be", "do", "go", "he", "if", "me", "no", "on", "to", "us", "we"]
    known = {f"Ġ{text}": id for id, text in enumerate(texts, start=5)}
    odd = {"<|end|>": 0, "ing": 1, "Ġ": 2, "Ċ": 3, "Ã": 4}
    words = vocabulary_of(known | odd)
    assert words.words == tuple(range(5, 17))
    assert words.text(5) == " at"
    assert (words.end, words.text(words.end)) == (0, "")
    with pytest.raises(Misconfigured, match="plain words"):
        vocabulary_of(odd)


# ---------------------------------------------------------------- answers

WORDS = Vocabulary({5: " at", 6: " be"}, 0)
Make = Callable[..., Shape]


def styled(kind: type[CompletionShape | ChatShape], **more: Any) -> Shape:
    given = {"token_ids": False, "logprobs": False, **more}
    return kind(Style(id="x", created=1, model="m", **given), WORDS, 1)


def answered() -> Sequence:
    one = sequence([1, 2, 3], max_tokens=2)
    one.tokens += [5, 6]
    one.local_tokens, one.ending = 2, Ending.LENGTH
    return one


def events(data: bytes) -> list[Any]:
    return [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]


@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
def test_streams_are_what_the_router_counts_and_corrects(kind: type[CompletionShape | ChatShape]) -> None:
    shape, one = styled(kind), answered()
    data = shape.first(0, one) + shape.token(0, one, 5) + shape.token(0, one, 6)
    assert sse.token_events(data + shape.usage([one]) + sse.DONE) == 2
    assert not sse.has_error(data)
    assert sse.completion_tokens(shape.usage([one])) == 2
    corrected = events(sse.with_cached_tokens(shape.usage([one]), 7))[0]
    assert corrected["choices"] == []
    assert corrected["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
def test_whole_answers_say_the_same_as_streams(kind: type[CompletionShape | ChatShape]) -> None:
    shape, one = styled(kind, token_ids=True, logprobs=True), answered()
    whole = json.loads(shape.whole([one]))
    (choice,) = whole["choices"]
    text = choice["text"] if kind is CompletionShape else choice["message"]["content"]
    assert (text, choice["finish_reason"], choice["token_ids"]) == (" at be", "length", [5, 6])
    assert choice["logprobs"]
    assert whole["kv_transfer_params"] is None
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    streamed = events(shape.token(0, one, 5) + shape.token(0, one, 6))
    said = [each["choices"][0] for each in streamed]
    assert "".join(each["text"] if kind is CompletionShape else each["delta"]["content"] for each in said) == text
    assert [each["token_ids"] for each in said] == [[5], [6]]


def test_garbage_in_an_answer_can_be_read_by_nobody() -> None:
    whole = json.loads(styled(CompletionShape, garbage=True).whole([answered()]))
    with pytest.raises(Exception, match="kv_transfer_params"):
        read_body(json.dumps({"kv_transfer_params": whole["kv_transfer_params"]}).encode()).leg()
