"""The thread that keeps a client's link: how often it dials, how it ends, and what is said of it after its death."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.errors import Lost
from kvrelay.protocol.client import Existing, Exists
from kvrelay.store import tether
from kvrelay.store.stock import SlotStock
from kvrelay.store.tether import Tether
from tests.patience import PATIENCE_S
from tests.store.conftest import FORMAT, KEY


class Dropping:
    """An attachment to a store that is gone at once."""

    async def run(self) -> None:
        raise Lost("the store broke the link")


class Store:
    """Takes ``dials``, drops each, and has the next one fail of what nobody expected."""

    def __init__(self, dials: int) -> None:
        self.dials = dials

    async def open(self, *_: object) -> Dropping:
        if not self.dials:
            raise ValueError("mmap length is greater than file size")
        self.dials -= 1
        return Dropping()


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """Of what threads died."""
    died: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: died.append(hook.exc_type))
    return died


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tether]:
    """One that has not started, whose store takes three dials."""
    monkeypatch.setattr(tether, "Attachment", Store(dials=3))
    monkeypatch.setattr(tether, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(tether, "LAST_RETRY_S", PATIENCE_S)
    yield (made := Tether(Path("store.sock"), KEY, "w/1", FORMAT, SlotStock(0)))
    made.close()


def test_a_thread_that_died_is_not_called_closed_and_leaves_nobody_waiting(
    kept: Tether, deaths: list[type[BaseException]]
) -> None:
    kept.start()
    kept._thread.join(PATIENCE_S)
    assert deaths == [ValueError], "whoever watches the threads of this process hears of it"
    assert "thread died" in repr(kept)
    with pytest.raises(Lost, match="thread died"):
        kept.ask(lambda id: Exists(id=id, names=[]), Existing).result(timeout=0)
    kept.close()
    assert "thread died" in kept.problem


@pytest.mark.usefixtures("deaths")
def test_a_store_that_drops_every_link_at_once_is_dialled_ever_more_rarely(kept: Tether) -> None:
    kept.start()
    kept._thread.join(PATIENCE_S)
    assert kept._retry_s == pytest.approx(0.008)


def test_closing_a_thread_that_is_just_ending_waits_for_it(kept: Tether, monkeypatch: pytest.MonkeyPatch) -> None:
    kept._loop.close()
    ending = threading.Event()
    monkeypatch.setattr(kept, "_thread", threading.Thread(target=ending.wait))
    kept.start()
    threading.Timer(0.01, ending.set).start()
    kept.close()
    assert not kept._thread.is_alive()
