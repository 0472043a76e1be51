"""What is broken when."""

from __future__ import annotations

import pytest

from kvrelay.deploy.chaos.script import OF_CLIENTS, Deed, Event, Script, Target

BOTH = (Deed.KILL, Deed.STOP)
FLEET = [
    *(Target(name=f"{kind}-{number}", kind=kind, deeds=BOTH) for kind in ("prefill", "decode") for number in range(4)),
    Target(name="store-0", kind="store", deeds=(Deed.KILL,)),
]


def events(fleet: list[Target], seed: int = 7, count: int = 400) -> list[Event]:
    script = Script(fleet, seed, every_s=0.3, lasts_s=(0.5, 4.0))
    return [script.next() for _ in range(count)]


def test_a_seed_says_it_all() -> None:
    assert events(FLEET) == events(FLEET)
    assert events(FLEET) != events(FLEET, seed=8)


def test_everything_is_done_to_everybody_who_can_suffer_it() -> None:
    done = {(event.target, event.deed) for event in events(FLEET)}
    assert done == {("", deed) for deed in OF_CLIENTS} | {(each.name, deed) for each in FLEET for deed in each.deeds}


@pytest.mark.parametrize("count", [2, 4, 9])
def test_most_of_a_kind_are_whole_at_any_time(count: int) -> None:
    fleet = [Target(name=f"decode-{number}", kind="decode", deeds=BOTH) for number in range(count)]
    now, most = 0.0, 0
    until: dict[str, float] = {}
    for event in events(fleet):
        now += event.after_s
        until = {name: end for name, end in until.items() if end > now}
        if event.target:
            assert event.target not in until, "what is broken is not broken again"
            until[event.target] = now + event.lasts_s
        most = max(most, len(until))
    assert most == max(1, int(0.34 * count))


def test_the_only_one_of_a_kind_is_spared_unless_it_is_a_store() -> None:
    fleet = [Target(name="d", kind="decode", deeds=BOTH), Target(name="s", kind="store", deeds=(Deed.KILL,))]
    assert {event.target for event in events(fleet)} == {"", "s"}
