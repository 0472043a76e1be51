"""A journal knows exactly what was sent."""

from __future__ import annotations

from kvrelay.fleet.journal import Journal


def test_a_journal_knows_tokens_and_text_of_each_choice_and_which_are_open() -> None:
    journal = Journal(prompts=2, choices=2, limits=[5, 5])
    assert [choice.prompt for choice in journal.choices] == [0, 0, 1, 1]
    journal.wrote(1, [7, 8], "ab")
    journal.wrote(1, [9], "", finished=True)
    journal.wrote(3, [4], "ü")
    assert (journal.tokens, journal.open) == (4, [0, 2, 3])
    assert list(journal.choices[1].ids) == [7, 8, 9]
    assert journal.choices[3].sent().matches("üx")
    assert not journal.choices[3].sent().matches("ux")
    assert not journal.choices[3].sent().matches("")


def test_a_worker_that_writes_more_than_it_was_asked_for_is_not_gone_on_with() -> None:
    journal = Journal(prompts=1, choices=1, limits=[2])
    journal.wrote(0, [1, 2, 3], "abc")
    assert journal.is_exact
    journal.wrote(0, [4], "d")
    assert not journal.is_exact
    assert len(journal.choices[0].ids) == 3


def test_a_choice_that_nobody_asked_for_spoils_the_journal() -> None:
    journal = Journal(prompts=1, choices=1, limits=[2])
    journal.wrote(1, [4], "d")
    assert not journal.is_exact


def test_text_without_tokens_is_not_gone_on_with() -> None:
    journal = Journal(prompts=1, choices=2, limits=[9])
    journal.wrote(0, [1], "a")
    journal.wrote(0, [], "held back before")
    assert journal.is_exact
    journal.wrote(1, [], "a")
    assert not journal.is_exact
    journal.wrote(1, [], "", finished=True)
    assert journal.is_exact


def test_what_is_more_than_text_is_known_as_such() -> None:
    journal = Journal(prompts=1, choices=1, limits=[9])
    journal.wrote(0, [1], "a", plain=False)
    assert journal.is_exact
    assert not journal.is_plain
