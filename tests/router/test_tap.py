"""A tap takes token ids out and everything else through, and knows what was sent."""

from __future__ import annotations

import json
from typing import Any

from kvrelay.fleet.journal import Journal
from kvrelay.router.tap import MAX_UNREAD, Tap, without_ids


def event(text: str, ids: list[int] | None, reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason, **more, "token_ids": ids}
    said = {"id": "a", "created": 3, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def tap(limit: int = 100, *, keeps_ids: bool = False) -> Tap:
    return Tap(Journal(1, 1, [limit]), keeps_ids=keeps_ids)


def test_the_client_gets_what_it_would_have_got_without_token_ids() -> None:
    tapped = tap()
    tricky = 'a "token_ids":[7] b'
    blocks = [event("x", [1], prompt_token_ids=[4, 5]), event(tricky, [2]), event("y", [3], "stop")]
    plain = [event("x", None, prompt_token_ids=None), event(tricky, None), event("y", None, "stop")]
    assert [tapped.take(block) for block in blocks] == [(block, False) for block in plain]
    assert without_ids(b"".join(blocks)) == b"".join(plain)
    (choice,) = tapped.journal.choices
    assert list(choice.ids) == [1, 2, 3]
    assert choice.sent().matches(f"x{tricky}y")
    assert choice.finished
    assert (tapped.head.id, tapped.head.created, tapped.head.model) == ("a", 3, "m")


def test_ids_are_found_however_their_event_is_spaced() -> None:
    spaced = b'data: {"choices": [{"index": 0, "text": "x", "token_ids": [1, 2], "prompt_token_ids" : [ 3 ]}]}\n\n'
    assert b"[" not in without_ids(spaced).replace(b'"choices": [', b"")


def test_the_first_event_of_a_later_choice_tells_no_ids_either() -> None:
    tapped = tap()
    tapped.take(event("x", [1]))
    assert tapped.take(event("y", [2], index=1, prompt_token_ids=[4, 5])) == (
        event("y", None, index=1, prompt_token_ids=None),
        False,
    )


def test_a_long_block_comes_out_as_its_events_would_one_by_one() -> None:
    texts = ["x", '"token_ids":[7]', "]", "[", '"token_ids":null', "\\", 'token_ids":[']
    reasons = [None, "stop"]
    blocks, plain = [], []
    for number in range(3_000):
        text, reason, ids = texts[number % len(texts)], reasons[number % len(reasons)], [*range(number % 5)]
        prompt = [number] if number % 11 == 0 else None
        blocks.append(event(text, ids, reason, prompt_token_ids=prompt))
        plain.append(event(text, None, reason, prompt_token_ids=None))
    assert without_ids(b"".join(blocks)) == b"".join(map(without_ids, blocks)) == b"".join(plain)


def test_the_ids_of_a_long_block_are_found_in_one_pass() -> None:
    """As often as it is long: no copy of all of it for each event."""
    block = Counted(event("x", [1]) * 1_000)
    assert without_ids(block) == event("x", None) * 1_000
    assert not block.copied_bytes


class Counted(bytes):
    """Knows how much of it was cut out."""

    copied_bytes = 0

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        self.copied_bytes += len(part) if isinstance(part, bytes) else 0
        return part


def test_ids_stay_for_who_asked_for_them() -> None:
    block = event("x", [1])
    assert tap(keeps_ids=True).take(block) == (block, False)


def test_events_are_journaled_however_they_are_cut_into_blocks() -> None:
    events = [event(chr(97 + at % 26), [at]) for at in range(3 * MAX_UNREAD + 1)]
    for size in (1, 2, 7, len(events)):
        tapped = tap()
        for at in range(0, len(events), size):
            tapped.take(b"".join(events[at : at + size]))
        assert list(tapped.journal.choices[0].ids) == list(range(len(events)))


def test_what_a_worker_says_when_it_gives_up_does_not_reach_the_client() -> None:
    error = b'data: {"error":{"message":"engine died","code":500}}\n\ndata: [DONE]\n\n'
    for farewell in (error, event("", [], "abort"), event("", [], "error") + b"data: [DONE]\n\n"):
        tapped = tap()
        assert tapped.take(event("x", [1]) + farewell) == (event("x", None), True)
        assert tapped.journal.open == [0]


def test_an_error_that_blames_the_request_reaches_the_client() -> None:
    error = b'data: {"error":{"message":"no","code":400}}\n\n'
    assert tap().take(error) == (error, False)


def test_what_cannot_be_read_is_passed_on_and_not_gone_on_from() -> None:
    tapped = tap()
    tapped.take(event("x", [1]))
    strange = b"data: {nobody knows}\n\n"
    assert tapped.take(strange) == (strange, False)
    assert not tapped.journal.is_exact


def test_reasoning_and_tool_calls_are_more_than_text() -> None:
    for more in ({"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}):
        tapped = tap()
        tapped.take(event("x", [1], delta={"content": "x", **more}))
        assert tapped.journal.is_exact
        assert not tapped.journal.is_plain
