"""What a model says of requests that leave it open."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.errors import Misconfigured
from kvrelay.policy.recover import Manner
from kvrelay.router.defaults import Defaults, read_defaults
from kvrelay.router.request import Kind, parse
from kvrelay.router.resumable import manner_of


def test_a_file_of_a_model_is_read_and_what_it_says_of_other_things_is_left_alone(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == Defaults()
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": [1, 2], "max_new_tokens": 2048, "presence_penalty": 1.5, "temperature": 0.6}')
    assert read_defaults(tmp_path) == Defaults(max_new_tokens=2048, presence_penalty=1.5)
    file.write_text("{")
    with pytest.raises(Misconfigured, match=r"generation_config\.json"):
        read_defaults(tmp_path)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", Manner.REPLAY),
        (b', "presence_penalty": null', Manner.REPLAY),
        (b', "presence_penalty": 0', Manner.CONTINUE),
    ],
)
def test_a_clients_own_value_counts_and_null_is_none(body: bytes, expected: Manner) -> None:
    request = parse(Kind.COMPLETION, b'{"prompt": "x", "stream": true' + body + b"}")
    assert manner_of(request, Defaults(presence_penalty=1.5), has_ids=True, replays=True) is expected


@pytest.mark.parametrize(("max_tokens", "room"), [(b"null", 30), (b"40", 40), (b"500", 90)])
def test_a_chat_without_a_limit_has_that_of_its_model(max_tokens: bytes, room: int) -> None:
    chat = parse(Kind.CHAT, b'{"messages": [], "max_tokens": ' + max_tokens + b"}")
    assert chat.room_tokens(10, 100, default_tokens=30) == room
