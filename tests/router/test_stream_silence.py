"""Whose silence it is."""

from __future__ import annotations

from kvrelay.router.stream_silence import StreamSilence


class Clock:
    """A clock that a test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_worker_is_silent_from_the_moment_it_is_waited_for() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    assert repr(silence) == "<StreamSilence, none>"
    silence.begin()
    clock.now_s = 103.0
    assert (silence.since_s, silence.silent_since_s) == (100.0, 100.0)
    silence.end()
    assert silence.silent_since_s is None


def test_a_worker_that_its_client_kept_from_sending_has_as_long_to_notice_that_it_may() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    silence.begin()
    silence.end()
    clock.now_s = 104.0  # so long the client took for the last piece
    silence.again()
    assert (silence.since_s, silence.silent_since_s) == (104.0, 108.0)
    silence.end()
    clock.now_s = 104.5  # and for the next one
    silence.again()
    assert silence.silent_since_s == 108.0, "the first time is not forgotten"
    silence.end()
    clock.now_s = 200.0
    silence.begin()
    assert silence.silent_since_s == 200.0


def test_a_slow_client_does_not_excuse_the_worker_after_the_one_it_kept_from_sending() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    silence.begin()
    silence.end()
    clock.now_s = 150.0
    silence.again()
    assert silence.silent_since_s == 200.0
    silence.leave()
    clock.now_s = 150.5
    silence.begin()
    assert silence.silent_since_s == 150.5


def test_what_a_client_kept_a_worker_from_sending_is_no_pace() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    for _ in range(3):
        silence.begin()
        silence.end()
        clock.now_s += 20.0
        silence.again()
        clock.now_s += 15.0
        silence.heard()
    assert silence.gap_s == 0.0


def test_a_quick_client_excuses_nobody() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    silence.begin()
    silence.end()
    silence.again()
    assert silence.silent_since_s == 100.0


def test_a_gap_between_two_words_is_known_once_there_were_two() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    gaps_s = []
    for gap_s in (2.0, 2.5, 9.0, 2.25):
        hear(silence, clock, gap_s)
        gaps_s.append(silence.gap_s)
    assert gaps_s == [0.0, 2.0, 2.5, 2.25], "one long gap is no pace"
    assert silence.since_s is None


def hear(silence: StreamSilence, clock: Clock, *gaps_s: float) -> None:
    """Words that come so long after one another."""
    for gap_s in gaps_s:
        silence.begin()
        clock.now_s += gap_s
        silence.heard()


def test_long_gaps_now_and_then_are_no_pace() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    hear(silence, clock, 5.0, 0.03125, 0.03125, 0.03125, 1.0, 1.0)
    assert silence.gap_s == 0.03125


def test_an_engine_that_has_become_slow_is_known_after_three_words() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    hear(silence, clock, *[0.03125] * 9, 1.0, 1.0, 1.0)
    assert silence.gap_s == 1.0


def test_words_of_one_step_are_no_pace() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    for _ in range(3):
        hear(silence, clock, 0.5, *[0.0] * 7)
    assert silence.gap_s == 0.5


def test_silence_before_a_worker_was_lost_is_no_gap() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    hear(silence, clock, 0.5, 0.5)
    silence.begin()
    clock.now_s += 30.0
    silence.end()
    assert silence.gap_s == 0.5


def test_gaps_of_one_worker_are_not_those_of_the_next() -> None:
    clock = Clock()
    silence = StreamSilence(clock)
    hear(silence, clock, 5.0, 5.0)
    silence.begin()
    silence.leave()
    assert (silence.since_s, silence.gap_s) == (None, 0.0)
    hear(silence, clock, 0.03125, 0.03125)
    assert silence.gap_s == 0.03125
