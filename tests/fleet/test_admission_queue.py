"""Who goes next among those who wait."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvrelay.fleet.admission_queue import AdmissionQueue, AdmissionQueues, QueuedRequest
from kvrelay.fleet.flight import Ask
from kvrelay.policy.admit import Slo
from kvrelay.types import RequestFacts


def waiting(
    name: str, tenant: str = "", *, seconds: float = 1.0, priority: int = 0, share: float = 1.0, until_s: float = 9.0
) -> QueuedRequest:
    facts = RequestFacts(request_id=name, model="m", prompt_tokens=(1,), max_tokens=1, page_names=())
    ask = Ask(facts=facts, tenant=tenant, received_s=0.0, slo=Slo(priority=priority, share=share))
    return QueuedRequest(ask=ask, seconds=seconds, since_s=0.0, until_s=until_s)


def queue(*requests: QueuedRequest) -> AdmissionQueue:
    made = AdmissionQueue()
    for request in requests:
        made.add(request)
    return made


def served(full: AdmissionQueue) -> list[str]:
    names = []
    while (head := full.head()) is not None:
        assert full.take() == head
        names.append(head.request_id)
    return names


def test_within_a_tenant_the_first_comes_first() -> None:
    assert served(queue(*(waiting(str(number)) for number in range(5)))) == ["0", "1", "2", "3", "4"]


def test_a_higher_priority_goes_first() -> None:
    assert served(queue(waiting("low"), waiting("high", priority=2), waiting("middle", priority=1))) == [
        "high",
        "middle",
        "low",
    ]


def test_a_tenant_that_asks_a_hundred_times_does_not_hold_up_one_that_asks_once() -> None:
    full = queue(*(waiting(f"many {number}", "many") for number in range(100)), waiting("one", "one"))
    assert "one" in served(full)[:2]


def test_a_tenant_with_long_prompts_gets_as_much_time_as_one_with_short_ones() -> None:
    long = [waiting(f"long {number}", "long", seconds=4.0) for number in range(100)]
    short = [waiting(f"short {number}", "short", seconds=0.5) for number in range(400)]
    first = served(queue(*long, *short))[:90]
    counts = Counter(name.split()[0] for name in first)
    assert counts["short"] == pytest.approx(8 * counts["long"], rel=0.2)


def test_who_leaves_is_not_served_and_frees_what_is_ahead_of_others() -> None:
    full = queue(waiting("a"), waiting("b", seconds=3.0), waiting("c", priority=-1))
    assert [full.ahead_s(waiting("new", priority=level).ask, 1.0) for level in (0, -1, 1)] == [4.0, 5.0, 0.0]
    assert full.drop("b") is not None
    assert full.drop("b") is None
    assert (full.ahead_s(waiting("new").ask, 1.0), len(full), "b" in full) == (1.0, 2, False)
    assert served(full) == ["a", "c"]
    assert repr(full) == "<AdmissionQueue 0 requests of 0 tenants>"


@pytest.mark.parametrize("seconds", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("mine", [0, 3, 30])
@pytest.mark.parametrize("share", [1.0, 3.0])
def test_what_is_said_to_go_first_does_so_up_to_one_request_of_each_tenant(
    seconds: float, mine: int, share: float
) -> None:
    full = queue(
        *(waiting(f"long {number}", "long", seconds=2.0) for number in range(20)),
        *(waiting(f"short {number}", "short", seconds=0.25) for number in range(20)),
        *(waiting(f"mine {number}", "mine", share=share) for number in range(mine)),
    )
    new = waiting("new", "mine", seconds=seconds, share=share)
    predicted_s = full.ahead_s(new.ask, seconds)
    took_s = {request.request_id: request.seconds for request in full}
    full.add(new)
    order = served(full)
    before_s = sum(took_s[name] for name in order[: order.index("new")])
    assert before_s == pytest.approx(predicted_s, abs=2.0 + 0.25 + 0.1)


def test_the_overdue_are_named() -> None:
    full = queue(waiting("soon", until_s=1.0), waiting("late", until_s=5.0))
    assert [request.request_id for request in full.overdue(1.0)] == []
    assert [request.request_id for request in full.overdue(1.1)] == ["soon"]


def test_nobody_is_taken_from_nobody() -> None:
    assert queue().head() is None
    with pytest.raises(IndexError):
        queue().take()


def test_every_model_has_a_room_while_somebody_waits_there() -> None:
    queues = AdmissionQueues()
    for name in ("a1", "a2", "b1"):
        request = waiting(name)
        facts = msgspec.structs.replace(request.ask.facts, model=name[0])
        queues.add(msgspec.structs.replace(request, ask=msgspec.structs.replace(request.ask, facts=facts)))
    assert (queues.take("b").request_id, queues.models(), len(queues)) == ("b1", ["a"], 2)
    assert queues.drop("b1") is None
    assert queues.drop("a1") is not None
    assert [request.request_id for request in queues.overdue(10.0)] == ["a2"]
    assert queues.take("a").request_id == "a2"
    assert (queues.models(), len(queues), len(queues.of("a"))) == ([], 0, 0)
