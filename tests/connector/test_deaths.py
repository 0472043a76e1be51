"""Engines without a model, their stores as processes, and what is left of a hand-off when one of them dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvrelay.protocol.engine import DecodeLeg, PrefillLeg, handoff_params
from kvrelay.store.client import StoreClient
from tests.connector.fake_engine import FORMAT, FakeEngine
from tests.patience import PATIENCE_S, wait_until
from tests.store.conftest import KEY, StoreProcess

Start = Callable[..., StoreProcess]
TOKENS = 300
PAGES = 10
ARENA_STRIDES = 2048
"""16 MB."""


def prompt(number: int, tokens: int = TOKENS) -> list[int]:
    return [(number * 977 + at * 13) % 5000 for at in range(tokens)]


@contextmanager
def attached(store: StoreProcess) -> Iterator[StoreClient]:
    client = StoreClient(store.socket_path, KEY, owner="looker/1", format=FORMAT)
    client.start()
    try:
        assert client.wait_attached(PATIENCE_S)
        yield client
    finally:
        client.close()


@pytest.fixture
def store(start_store: Start) -> StoreProcess:
    return start_store("store-0", pages=ARENA_STRIDES)


@pytest.fixture
def pair(store: StoreProcess) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    """P and D on one store."""
    with FakeEngine(store.socket_path, KEY, "p/1") as p, FakeEngine(store.socket_path, KEY, "d/1") as d:
        yield p, d


def legs(transfer: str, push_to: str | None = None) -> tuple[dict[str, object], dict[str, object]]:
    """What P and D are told."""
    return (
        handoff_params(PrefillLeg(transfer=transfer, push_to=push_to)),
        handoff_params(DecodeLeg(transfers=[transfer])),
    )


def at_rest(client: StoreClient) -> None:
    """Nothing is held for anybody: what is not a page in the cache is free or in an engine's stock."""
    wait_until(
        lambda: all(
            client.describe()[gauge] == 0
            for gauge in ("leases_open", "pages_pinned", "transfers_open", "pages_filling")
        )
    )


# ---------------------------------------------------------------- a store dies


def test_a_dead_store_costs_computing_and_engines_use_it_again_when_it_is_back(
    store: StoreProcess, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    p, d = pair
    assert p.serve(prompt(1)) == 0
    assert d.serve(prompt(1)) == TOKENS
    store.kill()
    wait_until(lambda: p.is_detached and d.is_detached)
    assert (p.serve(prompt(2)), d.serve(prompt(2)), d.serve(prompt(1))) == (0, 0, 0)
    store.start()
    p.wait_attached()
    d.wait_attached()
    assert d.serve(prompt(3)) == 0, "the new one is empty"
    assert p.serve(prompt(3)) == TOKENS, "and what is computed now is kept there"
    with attached(store) as client:
        at_rest(client)


def test_a_store_that_dies_in_the_middle_of_a_prefill_stops_no_step_and_gets_no_page_of_before(
    store: StoreProcess, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    p, d = pair
    running = p.begin(prompt(1))
    running.admit()
    running.compute(128)
    store.kill()
    running.compute(64)
    wait_until(lambda: p.is_detached and d.is_detached)
    store.start()
    p.wait_attached()
    d.wait_attached()
    running.compute()
    running.end()
    # Its first pages were saved into an arena that is gone: whatever the new one has of it is right, or it is not used.
    d.serve(prompt(1))
    assert d.serve(prompt(1)) == TOKENS
    with attached(store) as client:
        at_rest(client)


def test_a_load_from_a_store_that_dies_ends_and_the_rest_is_computed(
    store: StoreProcess, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    p, d = pair
    p_leg, d_leg = legs("t/0/0")
    prefill = p.begin(prompt(1), p_leg)
    prefill.admit()
    prefill.compute(128)
    decode = d.begin(prompt(1), d_leg)
    store.kill()
    assert decode.admit() < TOKENS
    decode.compute()
    decode.end()
    prefill.compute()
    prefill.end()


# ---------------------------------------------------------------- P dies


@pytest.fixture
def two_nodes(start_store: Start) -> Iterator[tuple[StoreProcess, StoreProcess, FakeEngine, FakeEngine]]:
    """P and D on a store each."""
    near, far = start_store("near", pages=ARENA_STRIDES), start_store("far", pages=ARENA_STRIDES)
    with ExitStack() as stack:
        p = stack.enter_context(FakeEngine(near.socket_path, KEY, "p/1"))
        d = stack.enter_context(FakeEngine(far.socket_path, KEY, "d/1"))
        yield near, far, p, d


Nodes = tuple[StoreProcess, StoreProcess, FakeEngine, FakeEngine]


def pages_at(store: StoreProcess) -> int:
    """Whole ones."""
    with attached(store) as client:
        told = client.describe()
        return told["pages_used"] - told["pages_filling"]


def test_what_arrived_before_p_died_is_loaded_and_d_computes_the_rest(two_nodes: Nodes) -> None:
    near, far, p, d = two_nodes
    p_leg, d_leg = legs("t/0/0", far.address)
    prefill = p.begin(prompt(1), p_leg)
    prefill.admit()
    prefill.compute(192)
    wait_until(lambda: pages_at(far) == 6)
    p.close()
    assert d.serve(prompt(1), d_leg) == 192
    for node in (near, far):
        with attached(node) as client:
            at_rest(client)


def test_another_p_goes_on_from_the_pages_that_the_first_one_left(two_nodes: Nodes) -> None:
    near, far, p, d = two_nodes
    first, _ = legs("t/0/0", far.address)
    prefill = p.begin(prompt(1), first)
    prefill.admit()
    prefill.compute(192)
    wait_until(lambda: pages_at(far) == 6)
    p.close()
    second, d_leg = legs("t/0/1", far.address)
    with FakeEngine(near.socket_path, KEY, "p/2") as successor:
        assert successor.serve(prompt(1), second) == 192, "its node's store kept what was whole"
        assert d.serve(prompt(1), d_leg) == TOKENS
    with attached(far) as client:
        at_rest(client)


@pytest.mark.slow
def test_a_p_that_dies_before_its_first_page_leaves_nothing_and_d_computes_all(two_nodes: Nodes) -> None:
    near, far, p, d = two_nodes
    p_leg, d_leg = legs("t/0/0", far.address)
    p.begin(prompt(1), p_leg)
    p.close()
    assert d.serve(prompt(1), d_leg) == 0
    for node in (near, far):
        with attached(node) as client:
            at_rest(client)


def test_a_p_that_dies_after_its_last_page_is_not_missed(two_nodes: Nodes) -> None:
    _, far, p, d = two_nodes
    p_leg, d_leg = legs("t/0/0", far.address)
    p.serve(prompt(1), p_leg)
    wait_until(lambda: pages_at(far) == PAGES)
    p.close()
    assert d.serve(prompt(1), d_leg) == TOKENS


def test_ps_store_dies_in_the_middle_of_its_push_and_d_takes_what_arrived(two_nodes: Nodes) -> None:
    near, far, p, d = two_nodes
    p_leg, d_leg = legs("t/0/0", far.address)
    prefill = p.begin(prompt(1), p_leg)
    prefill.admit()
    prefill.compute(192)
    wait_until(lambda: pages_at(far) == 6)
    near.kill()
    assert d.serve(prompt(1), d_leg) == 192
    prefill.compute()
    prefill.end()
    with attached(far) as client:
        at_rest(client)
