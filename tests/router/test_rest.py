"""The rest of a text begins at the very character where its first part ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvrelay.fleet.flight import DecodeOrder
from kvrelay.identity import near_salt
from kvrelay.router.legs import decode_body, replay_body, rest_body
from kvrelay.router.request import Kind, parse
from kvrelay.router.rest import Differs, RestOfText, StopRules
from kvrelay.router.tokens import load_tokens

LETTERS = dict(enumerate("abcdefgh"))


def rest(text: str, *stops: str, sent: int | None = None, tokens: int = 0, **rules: object) -> RestOfText:
    made = StopRules(stops=stops, **rules)  # type: ignore[arg-type]
    sent_chars = max(0, len(text) - made.held_chars) if sent is None else sent
    return RestOfText(LETTERS.__getitem__, made, text=text, tokens=tokens, sent_chars=sent_chars)


def test_what_was_held_back_at_the_cut_comes_with_the_rest() -> None:
    text = rest("xxab", "bcd")
    assert text.write([0]) == 1
    assert text.take(finished=False) == "ab"[:1]
    assert text.write([4], ended_by_token=True) == 1
    assert text.take(finished=True) == "ba"


@pytest.mark.parametrize(("included", "expected"), [(False, "x"), (True, "cd")])
def test_a_stop_string_that_straddles_the_cut_ends_the_text(included: bool, expected: str) -> None:
    text = rest("xxb", "bcd", included=included)
    assert text.write([2, 3, 0, 0]) == 2
    assert text.stopped_by == "bcd"
    assert text.take(finished=True) == expected


def test_of_two_stop_strings_the_one_that_ends_first_counts() -> None:
    text = rest("x", "cde", "d")
    assert text.write([2, 3, 4]) == 2
    assert (text.stopped_by, text.text) == ("d", "xc")


def test_no_stop_string_counts_before_the_least_number_of_tokens_nor_one_that_ended_before() -> None:
    text = rest("xd", "d", min_tokens=4, tokens=2)
    assert text.write([3, 3]) == 2
    assert text.stopped_by is None
    assert text.write([0]) == 1
    assert text.stopped_by is None
    assert text.write([3]) == 1
    assert text.text == "xddda"


def test_a_text_whose_tokens_nobody_tells_is_not_gone_on_with() -> None:
    with pytest.raises(Differs, match="without its tokens"):
        rest("xx").read([], "hidden", None)


def test_the_rest_is_asked_for_with_the_page_types_and_the_salt_of_the_whole() -> None:
    request = parse(Kind.COMPLETION, b'{"model": "m", "prompt": "x", "stream": true}')
    order = DecodeOrder(
        worker="d", url="http://d", transfers=("t",), home="h", page_dtypes=("float32",), context_tokens=512
    )
    whole = decode_body(request, order, [[1, 2]], "tenant")
    bodies = [
        json.loads(body)
        for body in (
            whole,
            rest_body(request, order, [1, 2, 3], "tenant", written=1, room_tokens=9),
            replay_body(request, order, [1, 2], "tenant", written=[3], choice=0),
        )
    ]
    legs = [body["kv_transfer_params"]["kvrelay"] for body in bodies]
    assert legs == [legs[0]] * 3
    assert legs[0]["page_dtypes"] == ["float32"]
    assert [body["cache_salt"] for body in bodies] == [near_salt("tenant")] * 3


@pytest.mark.parametrize("cut", range(1, 12))
async def test_characters_whose_bytes_lie_on_both_sides_of_the_cut_are_whole(model_folder: Path, cut: int) -> None:
    tokens = load_tokens(model_folder)
    plain = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    prompt, ids = plain.encode("Hello").ids, plain.encode("aä→🦊 Ωé", add_special_tokens=False).ids
    assert len(ids) > 12
    first, said = await tokens.text_after(prompt, ids[:cut], skip_special=True)
    assert "�" not in said
    text = RestOfText(first.step, StopRules(), text=said, tokens=cut, sent_chars=len(said))
    text.write(ids[cut:])
    assert said + text.take(finished=True) == "aä→🦊 Ωé"
    tokens.close()
