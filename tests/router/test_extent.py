"""What a body may consist of is counted before it is read, and what stands in a text does not count."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvrelay.errors import BadRequest
from kvrelay.router import extent
from kvrelay.router.extent import MAX_PARTS, MAX_VALUES, check_extent
from kvrelay.router.request import Kind, parse

PROMPT_CHARS = 663_000
"""The longest prompt of a model with 8,192 tokens of context whose longest token has 81 characters."""
MILLION = 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("run", ["{", "[", ",", '"', "\\", '\\"', '{"a":[1,"b"]},', ":", "\n", "\u4e2d"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_text_may_consist_of_anything(run: str, ascii_only: bool) -> None:
    prompt = (run * PROMPT_CHARS)[:PROMPT_CHARS]
    for text in (prompt, prompt * 4):
        body = json.dumps({"prompt": text, "stop": ["\\"], "user": '"{'}, ensure_ascii=ascii_only).encode()
        assert parse(Kind.COMPLETION, body).prompts == [text]


def test_a_million_token_ids_and_twenty_thousand_messages_may_be_sent() -> None:
    ids = list(range(MILLION))
    assert parse(Kind.COMPLETION, json.dumps({"prompt": ids}).encode()).prompts == [ids]
    messages = [{"role": "user", "content": "Hello"}] * (MAX_PARTS // 5 - 1)
    assert parse(Kind.CHAT, json.dumps({"messages": messages}).encode()).body["messages"] == messages


@pytest.mark.parametrize("many", ["{}", "[]", '""', '"\\""', '"{"', '{"a":1}', '["\\\\"]'])
def test_more_parts_than_may_be_are_a_413(many: str) -> None:
    body = f'{{"prompt":"Hi","x":[{many}' + f",{many}" * MAX_PARTS + "]}"
    assert refused(body.encode())


@pytest.mark.parametrize("many", ["1", "null", "1.5", "true"])
def test_more_values_than_may_be_are_a_413(many: str) -> None:
    body = f'{{"prompt":"Hi","x":[{many}' + f",{many}" * MAX_VALUES + "]}"
    assert refused(body.encode())


def test_fields_of_one_object_count() -> None:
    fields = ",".join(f'"k{number}":1' for number in range(MAX_PARTS))
    assert refused(b'{"prompt":"Hi",%s}' % fields.encode())


def test_the_limits_are_those_that_the_message_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent, "MAX_PARTS", 4)
    check_extent(b'{"prompt": [[1]]}')
    assert refused(b'{"prompt": [[1], []]}')
    monkeypatch.setattr(extent, "MAX_VALUES", 3)
    check_extent(b'{"prompt": [1, 2, 3]}')
    assert refused(b'{"prompt": [1, 2, 3, 4]}')


def test_a_long_body_of_small_parts_is_refused_with_little_memory() -> None:
    """As many objects would take over a gigabyte."""
    code = (
        "import resource\n"
        "from kvrelay.errors import BadRequest\n"
        "from kvrelay.router.request import Kind, parse\n"
        'body = b\'{"prompt":"hi","x":[\' + b"{}," * 11_000_000 + b"{}]}"\n'
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    parse(Kind.COMPLETION, body)\n"
        "except BadRequest as error:\n"
        "    assert error.status == 413, error\n"
        "    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000\n"
        "else:\n"
        "    raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def refused(body: bytes) -> bool:
    with pytest.raises(BadRequest) as caught:
        parse(Kind.COMPLETION, body)
    assert "send them in several requests" in str(caught.value)
    return caught.value.status == 413
