"""A prompt and its answer as one sequence, and how many of its tokens are read to name what grows."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.fleet.flight import Ask
from kvrelay.identity import name_pages, root_name
from kvrelay.router.joined import Joined
from kvrelay.router.naming import Naming
from kvrelay.router.request import Kind, parse
from kvrelay.router.resumable import Remains
from kvrelay.types import PageName, RequestFacts
from tests.fleet.values import fingerprint

PAGE = fingerprint().format.page_tokens
ROOT, KIND = root_name(fingerprint()), PageName(b"k" * 16)
PROMPT = list(range(10 * PAGE + 1))


class Read(list[int]):
    """Counts its elements that are read."""

    reads = 0

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.reads += len(found) if isinstance(found, list) else 1
        return found


def remains(prompt: list[int]) -> Remains:
    request = parse(Kind.COMPLETION, b'{"model": "tiny", "prompt": [1], "max_tokens": 99, "stream": true}')
    facts = RequestFacts(request_id="r", model="tiny", prompt_tokens=(len(prompt),), max_tokens=99, page_names=())
    return Remains(
        request, Ask(facts=facts, received_s=0.0), [prompt], [99], Naming(lambda: {KIND: (ROOT, PAGE)}, 9999)
    )


def test_an_answer_that_is_asked_about_again_is_named_without_a_look_at_what_was_named_before() -> None:
    prompt, written = Read(PROMPT), list[int]()
    asked = remains(prompt)
    for token in range(2 * PAGE):
        asked.journal.wrote(0, [token], "a")
        written.append(token)
        names, tokens = asked.written()
        assert tokens == len(PROMPT) + len(written)
        assert names == {KIND: tuple(name_pages(ROOT, PROMPT + written, PAGE)[: tokens // PAGE])}
    assert prompt.reads == len(PROMPT)


@pytest.mark.parametrize("at", [slice(None), slice(2, 5), slice(3, 3), slice(0, 2), slice(4, 99), slice(5, None, -2)])
def test_parts_are_those_of_one_sequence(at: slice) -> None:
    joined = Joined([0, 1, 2], [3, 4, 5])
    assert joined[at] == [0, 1, 2, 3, 4, 5][at]


def test_elements_are_those_of_one_sequence() -> None:
    joined = Joined([0, 1, 2], [3, 4])
    assert list(joined) == [joined[place] for place in range(5)] == [0, 1, 2, 3, 4]
    assert (len(joined), joined[-1], joined[-5]) == (5, 4, 0)
    with pytest.raises(IndexError):
        joined[5]
