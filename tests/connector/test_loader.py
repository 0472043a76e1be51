"""How often pending loads look at the arena."""

from kvrelay.connector.loader import LONGEST_POLL_S, POLL_S, pause_s


def test_a_layer_that_follows_another_is_looked_for_at_once() -> None:
    assert pause_s(silent_s=0.001, looked_s=0.00002) == POLL_S


def test_looking_costs_the_engine_little_however_many_loads_are_pending() -> None:
    looked_s = 0.0002
    assert pause_s(silent_s=0.0, looked_s=looked_s) >= 10 * looked_s


def test_the_longer_nothing_came_the_rarer_are_the_looks_but_never_rare() -> None:
    pauses = [pause_s(silent_s=silent_s, looked_s=0.00005) for silent_s in (0.0, 0.01, 0.02, 1.0, 60.0)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_POLL_S
