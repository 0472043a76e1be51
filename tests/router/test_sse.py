"""Streams as bytes: cut into events, changed in one place."""

from __future__ import annotations

import json

import pytest

from kvrelay.errors import Malformed
from kvrelay.router import sse

STREAM = b'data: {"id":"x"}\n\ndata: {"text":"a\\n\\nb"}\n\n: ping\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_however_bytes_arrive_only_whole_events_come_out(step: int) -> None:
    splitter = sse.EventSplitter()
    blocks = [splitter.feed(STREAM[at : at + step]) for at in range(0, len(STREAM), step)]
    assert b"".join(blocks) == STREAM
    assert all(block.endswith(b"\n\n") for block in blocks if block)
    assert repr(splitter) == "<EventSplitter 0 bytes of an unfinished event>"


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    splitter = sse.EventSplitter()
    splitter.feed(b"x" * 100)
    with pytest.raises(Malformed, match="longer than 100 bytes"):
        splitter.feed(b"x")


@pytest.mark.parametrize("spaces", [None, (",", ":"), (", ", ": ")])
@pytest.mark.parametrize(
    "details", [{"cached_tokens": 9}, {"audio": None, "cached_tokens": 9}, {"cached_tokens": None}]
)
def test_the_cached_tokens_are_replaced_in_any_spacing(
    spaces: tuple[str, str] | None, details: dict[str, object]
) -> None:
    usage = {"prompt_tokens": 10, "prompt_tokens_details": details, "completion_tokens": 3}
    body = json.dumps({"usage": usage}, separators=spaces).encode()
    changed = json.loads(sse.with_cached_tokens(body, 4))
    assert changed == {"usage": usage | {"prompt_tokens_details": details | {"cached_tokens": 4}}}
    assert sse.completion_tokens(body) == 3
    assert sse.with_cached_tokens(body, None) == body


def test_text_that_looks_like_usage_is_left_alone() -> None:
    text = '"prompt_tokens_details":{"cached_tokens":9} "completion_tokens": 77'
    body = json.dumps({"choices": [{"text": text}]}).encode()
    assert sse.with_cached_tokens(body, 4) == body
    assert sse.completion_tokens(body) is None


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (b'data: {"id":"x"}\n\n', None),
        (b'data: {"error":{"message":"m","code":400}}\n\n', 400),
        (b'data: {"error":{"message":"m","code":null}}\n\n', 500),
        (b'data: {"error": "broken\n\n', 500),
        (b'data: {"id":"x"}\n\ndata: {"error":{"code":400}}\n\n', None),
    ],
)
def test_only_an_error_that_comes_first_is_a_status(block: bytes, status: int | None) -> None:
    assert sse.error_status(block) == status


def test_an_error_event_is_found_anywhere_in_a_block_but_not_inside_text() -> None:
    assert sse.has_error(b'data: {"id":"x"}\n\ndata: {"error":{"code":400}}\n\n')
    assert not sse.has_error(b'data: {"text":"data: {\\"error\\""}\n\n')


def test_our_own_error_event_is_json_in_one_event() -> None:
    event = sse.error_event("gone", 502)
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 502


def _chat(delta: str, tail: str = "") -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{' + delta.encode() + b"}" + tail.encode() + b"}]}\n\n"


def test_only_events_that_carry_a_token_are_counted() -> None:
    role = _chat('"role":"assistant","content":""')
    word = _chat('"content":"The"')
    quoting = _chat(r'"content":"\"delta\":{\"role\":"')
    end = _chat('"content":""', ',"finish_reason":"stop"')
    usage = b'data: {"choices":[],"usage":{"completion_tokens":4}}\n\n'
    stream = [role, word + quoting, end + usage + sse.DONE]
    assert [sse.token_events(block) for block in stream] == [0, 2, 1]
    assert sse.token_events(b'data: {"choices":[{"text":"a"}]}\n\n' + sse.DONE) == 1
