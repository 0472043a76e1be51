"""Tests of cli/prose.py."""

from __future__ import annotations

import io

import pytest

from kvrelay.cli.prose import Prose

TEXT = "A cache keeps what was computed before.\n\n  1. It is looked up by name, with extraordinarily long words.\n"


def written(pieces: list[str], width: int = 20) -> str:
    output = io.StringIO()
    prose = Prose(output, width)
    for piece in pieces:
        prose.write(piece)
    prose.end()
    return output.getvalue()


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_lines_break_at_words_however_the_pieces_are_cut(step: int) -> None:
    text = written([TEXT[at : at + step] for at in range(0, len(TEXT), step)])
    assert max(map(len, text.splitlines())) <= 20
    assert text.split() == TEXT.split()
    assert "\n\n  1. It is" in text


def test_a_word_longer_than_a_line_stays_whole() -> None:
    assert written(["see http://127.0.0.1:8000/kvrelay now"]) == "see\nhttp://127.0.0.1:8000/kvrelay\nnow\n"


def test_no_line_ends_in_a_blank() -> None:
    assert all(line == line.rstrip() for line in written(["one two three four five six seven "]).splitlines())


def test_a_word_is_written_as_soon_as_it_is_complete() -> None:
    output = io.StringIO()
    prose = Prose(output, 20)
    prose.write("one tw")
    assert output.getvalue() == "one"
    prose.write("o ")
    assert output.getvalue() == "one two"


def test_what_comes_between_gets_a_line_of_its_own_and_the_text_goes_on_in_the_next() -> None:
    output = io.StringIO()
    prose = Prose(output, 20)
    prose.interrupt()
    for piece in ("one tw", "o "):
        prose.write(piece)
        prose.interrupt()
        output.write("(a notice)\n")
    prose.write("three")
    prose.end()
    assert output.getvalue() == "one\n(a notice)\ntwo\n(a notice)\nthree\n"


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_answer_ends_no_line_twice(text: str) -> None:
    assert written([text]) == text
