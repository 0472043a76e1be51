"""The one suite that every way to carry pages between stores passes, and the self-test that chooses among them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvrelay.channel import bind_tcp, bind_unix
from kvrelay.config import Config, StoreConfig
from kvrelay.errors import Lost
from kvrelay.protocol.client import NewPage, OpenTransfer
from kvrelay.protocol.peer import Meet, Met
from kvrelay.store.arena import SlotState, checksums
from kvrelay.store.batch import Batch
from kvrelay.store.copying import read_page
from kvrelay.store.daemon import StoreDaemon
from kvrelay.store.inbound import Inbound
from kvrelay.store.outbound import WINDOW, Outbound
from kvrelay.store.page import Page
from kvrelay.store.paths.choice import Proven
from kvrelay.store.paths.trial import MAX_PROBE_BYTES, prove
from kvrelay.store.push import RAW_BATCH_BYTES
from kvrelay.store.reception import Reception, Visit
from kvrelay.store.shelf import Shelf
from kvrelay.types import PageFormat, Shard, SlotRef, Transport
from tests.patience import until
from tests.store.conftest import FORMAT, KEY, page_name, payload

BIG = PageFormat(layers=4, kv_heads=8, head_dim=128, dtype="float32", page_tokens=32)
"""1 MiB: a batch holds four of them."""

CONTROL = "control"
HAS_NIXL = find_spec("nixl") is not None
NIXL = pytest.param(Transport.NIXL, marks=pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed"))
KINDS: list[Any] = [CONTROL, Transport.TCP, Transport.SHM, NIXL]
DIRECT: list[Any] = [Transport.SHM, NIXL]


class Store:
    """A store in this process, on real sockets."""

    def __init__(self, folder: Path, name: str, transports: tuple[Transport, ...], stall_s: float, size: int) -> None:
        config = Config(store=StoreConfig(arena_bytes=size, transports=transports, stalled_push_s=stall_s, streams=2))
        self.local, self.remote = bind_unix(folder / f"{name}.sock"), bind_tcp("127.0.0.1", 0)
        host, port = self.remote.getsockname()
        self.address = f"{host}:{port}"
        self.daemon = StoreDaemon(config, name, KEY, (), self.address)
        self.keeper = self.daemon.keeper
        self.writer = self.keeper.join("w", 0.0)
        self.ready = asyncio.Event()
        self.task = asyncio.create_task(self.daemon.run(self.local, self.remote, lambda info: self.ready.set()))

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def shelf(self, format: PageFormat = FORMAT) -> Shelf:
        return self.keeper.room.shelf(format)

    def announce(self, number: int, tokens: int = 8, shards: int = 1, format: PageFormat = FORMAT) -> SlotRef:
        (ref,) = self.keeper.catalog.grant(self.writer, self.shelf(format), 1, self.now)
        page = self.keeper.begin(self.writer, NewPage(page_name(number), ref, tokens, shards=shards), None, self.now)
        assert page is not None
        return ref

    def publish(
        self, number: int, ref: SlotRef, layers: Iterable[int], tokens: int = 8, shards: int = 1,
        format: PageFormat = FORMAT,
    ) -> None:  # fmt: skip
        arena, size = self.shelf(format).arena, tokens * format.token_layer_bytes
        data = memoryview(payload(number, tokens, format))
        for layer in layers:
            part = data[layer * size : (layer + 1) * size]
            arena.segment(ref.slot, layer, tokens)[:] = part
            for shard, checksum in enumerate(checksums(part, size // shards)):
                arena.publish(ref, layer, checksum, Shard(shard, shards))
        self.keeper.progress(self.now)

    def put(self, number: int, tokens: int = 8, shards: int = 1, format: PageFormat = FORMAT) -> SlotRef:
        ref = self.announce(number, tokens, shards, format)
        self.publish(number, ref, range(format.layers), tokens, shards, format)
        return ref

    def push(self, transfer: str, numbers: Sequence[int], tokens: int, to: Store, format: PageFormat = FORMAT) -> None:
        names = [page_name(number) for number in numbers]
        message = OpenTransfer(transfer=transfer, names=names, total_tokens=tokens, push_to=to.address)
        self.daemon.peers.open(self.writer, message, self.shelf(format), self.now)

    def page(self, number: int) -> Page | None:
        return self.keeper.catalog.find(page_name(number))

    def read(self, number: int) -> bytes | None:
        page = self.page(number)
        if page is None or page.state is not SlotState.COMPLETE:
            return None
        return read_page(page.shelf.arena, page.ref, page.tokens, page.shards)

    def link(self, to: Store) -> Outbound:
        return self.daemon.peers.link(to.address)

    @property
    def is_idle(self) -> bool:
        self.keeper.tick(self.now)
        counts = self.keeper.describe()
        return not any(counts[n] for n in ("pages_pinned", "pages_filling", "slots_failed", "transfers_open"))

    def end_writer(self) -> None:
        self.keeper.leave(self.writer, self.now)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Ends:
    """P's store and D's, and a proven path between them."""

    def __init__(self, folder: Path, kind: Any, stall_s: float = 5.0, size: int = 1 << 26) -> None:
        self.kind = kind
        transports = () if kind is CONTROL else (kind,)
        self.p = Store(folder, "store-p", transports, stall_s, size)
        self.d = Store(folder, "store-d", (*Transport,), stall_s, size)

    async def meet(self) -> None:
        await self.ready()
        self.p.daemon.peers.meet([self.d.address])
        if self.kind is not CONTROL:
            await until(lambda: self.best() is not None)

    async def ready(self) -> None:
        await asyncio.gather(self.p.ready.wait(), self.d.ready.wait())

    def best(self) -> Proven | None:
        paths = self.p.link(self.d)._paths
        return paths.best if paths else None

    def transport(self, transfer: str) -> Transport:
        found = self.d.keeper.transfers.get(transfer)
        assert found is not None
        return found.traffic.transport

    def replace(self, wrap: Callable[[Any], Any]) -> None:
        """Put something before the path that is taken."""
        paths = self.p.link(self.d)._paths
        assert paths is not None
        if self.kind is CONTROL:
            paths._last = wrap(paths._last)
        else:
            paths._proven = [Proven(wrap(each.path), each.score) for each in paths._proven]

    async def settled(self) -> None:
        await until(lambda: self.p.is_idle and self.d.is_idle and not self.are_warming)
        self.check()

    @property
    def are_warming(self) -> bool:
        shelves = [shelf for store in (self.p, self.d) for shelf in store.keeper.room.shelves.values()]
        return any(shelf._warming for shelf in shelves)

    def check(self) -> None:
        self.p.keeper.check_invariants()
        self.d.keeper.check_invariants()


@contextlib.asynccontextmanager
async def ends_of(folder: Path, kind: Any, **options: Any) -> AsyncIterator[Ends]:
    ends = Ends(folder, kind, **options)
    try:
        await ends.meet()
        yield ends
    finally:
        await ends.p.stop()
        await ends.d.stop()


@pytest.fixture(params=KINDS, ids=str)
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ends]:
    async with ends_of(tmp_path, request.param) as pair:
        yield pair


def arrived(store: Store, numbers: Iterable[int], tokens: Callable[[int], int] = lambda n: 8) -> bool:
    return all(store.read(number) == payload(number, tokens(number)) for number in numbers)


# ---------------------------------------------------------------- what every path does


async def test_whole_and_partial_pages_arrive_and_the_transport_is_named(ends: Ends) -> None:
    def tokens(number: int) -> int:
        return 3 if number == 9 else 8

    for number in range(10):
        ends.p.put(number, tokens(number))
    ends.p.push("t", range(10), 8 * 9 + 3, ends.d)
    await until(lambda: arrived(ends.d, range(10), tokens))
    assert ends.transport("t") is (Transport.TCP if ends.kind is CONTROL else ends.kind)
    size = sum(len(payload(0, tokens(number))) for number in range(10))
    assert ends.d.keeper.counts["bytes_received"] == size
    await ends.settled()
    assert ends.p.keeper.counts["bytes_pushed"] == size


async def test_layers_that_come_in_any_order_arrive_each_once(ends: Ends) -> None:
    ends.p.push("t", range(6), 48, ends.d)
    refs = [ends.p.announce(number) for number in range(6)]
    order = [(number, layer) for layer in (2, 0, 1) for number in (3, 0, 5, 1, 4, 2)]
    for number, layer in order:
        ends.p.publish(number, refs[number], [layer])
        await asyncio.sleep(0.002)
    await until(lambda: arrived(ends.d, range(6)))
    assert ends.d.keeper.counts["bytes_received"] == 6 * FORMAT.page_bytes
    await ends.settled()


async def test_pages_of_several_shards_arrive_beside_pages_of_one(ends: Ends) -> None:
    for number in range(6):
        ends.p.put(number, shards=1 + number % 2)
    ends.p.push("t", range(6), 48, ends.d)
    await until(lambda: arrived(ends.d, range(6)))
    shards = [page.shards for number in range(6) if (page := ends.d.page(number)) is not None]
    assert shards == [1, 2, 1, 2, 1, 2]
    await ends.settled()


async def test_many_pushes_of_many_batches_share_the_path(tmp_path: Path, ends: Ends) -> None:
    numbers = range(12)
    for number in numbers:
        ends.p.put(number, 32, format=BIG)
    for transfer in range(4):
        ends.p.push(f"t{transfer}", numbers[3 * transfer : 3 * transfer + 3], 96, ends.d, BIG)
    await until(lambda: all(ends.d.read(number) == payload(number, 32, BIG) for number in numbers))
    await ends.settled()
    assert ends.d.keeper.counts["pages_received"] == 12


async def test_damaged_bytes_are_refused_counted_and_looked_for_at_the_sender(ends: Ends) -> None:
    for number in range(3):
        ends.p.put(number)
    page = ends.p.page(1)
    assert page is not None
    ends.p.shelf().arena.segment(page.ref.slot, 2, 8)[5] ^= 4
    ends.p.push("t", range(3), 24, ends.d)
    await until(lambda: ends.d.keeper.counts["transfers_failed"] == 1)
    assert arrived(ends.d, (0, 2))
    assert ends.d.page(1) is None
    assert ends.d.keeper.counts["checksum_failures"] == 1
    await until(lambda: ends.p.keeper.counts["pages_damaged"] == 1)
    await ends.settled()


async def test_a_page_that_the_receiver_gave_up_is_never_published(ends: Ends) -> None:
    ends.p.push("t", range(2), 16, ends.d)
    refs = [ends.p.announce(number) for number in range(2)]
    for number in range(2):
        ends.p.publish(number, refs[number], [0])
    await until(lambda: ends.d.page(0) is not None and ends.d.page(0).layers_in == 1)  # type: ignore[union-attr]
    given_up = ends.d.page(0)
    assert given_up is not None
    ends.d.keeper.catalog.fail(given_up, ends.d.now)
    for number in range(2):
        ends.p.publish(number, refs[number], [1, 2])
    await until(lambda: arrived(ends.d, [1]))
    assert given_up.state is not SlotState.COMPLETE
    assert ends.d.page(0) is None
    await ends.settled()


async def test_a_transfer_lives_as_long_as_its_batches_are_taken(ends: Ends) -> None:
    ends.p.push("t", range(2), 16, ends.d)
    transfer = ends.p.keeper.transfers.get("t")
    assert transfer is not None
    began = transfer.expires
    ends.p.put(0)
    await until(lambda: arrived(ends.d, [0]))
    await until(lambda: transfer.expires > began)
    assert transfer.is_open
    ends.p.end_writer()
    await ends.settled()


class Gate:
    """A path that carries nothing until it is opened."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.transport = path.transport
        self.open = asyncio.Event()
        self.carrying = 0

    def takes(self, batch: Batch) -> bool:
        taken: bool = self.path.takes(batch)
        return taken

    async def carry(self, batch: Batch) -> int:
        self.carrying += 1
        await self.open.wait()
        restarts: int = await self.path.carry(batch)
        return restarts

    def close(self) -> None:
        self.path.close()


@pytest.mark.slow
async def test_a_receiver_that_stops_taking_holds_up_a_window_of_batches_and_no_more(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = asyncio.Event()
    answer = Inbound._answer

    async def later(self: Inbound, *arguments: Any) -> None:
        await stopped.wait()
        await answer(self, *arguments)

    monkeypatch.setattr(Inbound, "_answer", later)
    numbers = range(WINDOW * RAW_BATCH_BYTES // BIG.page_bytes + 6)
    for number in numbers:
        ends.p.put(number, 32, format=BIG)
    ends.p.push("t", numbers, 32 * len(numbers), ends.d, BIG)
    await until(lambda: ends.p.link(ends.d)._in_flight == WINDOW)
    ends.p.link(ends.d).wake()
    for _ in range(100):  # it has all the turns that it could send more in
        await asyncio.sleep(0)
    assert ends.p.link(ends.d)._in_flight == WINDOW
    assert ends.p.keeper.counts["bytes_pushed"] == 0
    assert ends.p.keeper.describe()["pages_pinned"] == len(numbers)
    stopped.set()
    await until(lambda: all(ends.d.read(number) == payload(number, 32, BIG) for number in numbers))
    await ends.settled()


class Dying:
    """A path that is lost in the middle of its second batch, before or after the bytes went."""

    def __init__(self, path: Any, *, after: bool) -> None:
        self.path = path
        self.transport = path.transport
        self.batches = 0
        self.after = after

    def takes(self, batch: Batch) -> bool:
        taken: bool = self.path.takes(batch)
        return taken

    async def carry(self, batch: Batch) -> int:
        self.batches += 1
        if self.batches >= 2:
            if self.after:
                await self.path.carry(batch)
            raise Lost("planted")
        restarts: int = await self.path.carry(batch)
        return restarts

    def close(self) -> None:
        self.path.close()


async def push_whole(ends: Ends, *, batches: int) -> None:
    """Push so many of the largest batches; all of it arrives, undamaged and once."""
    numbers = range(batches * RAW_BATCH_BYTES // BIG.page_bytes)
    for number in numbers:
        ends.p.put(number, 32, format=BIG)
    ends.p.push("t", numbers, 32 * len(numbers), ends.d, BIG)
    await until(lambda: all(ends.d.read(number) == payload(number, 32, BIG) for number in numbers))
    await ends.settled()
    assert ends.d.keeper.counts["transfers_arrived"] == 1
    assert ends.d.keeper.counts["checksum_failures"] == 0


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", KINDS[1:])
async def test_a_path_that_dies_in_the_middle_is_replaced_by_the_next_one(
    tmp_path: Path, kind: Transport, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.store.paths.choice.RETRY_S", 3600.0)
    async with ends_of(tmp_path, kind) as ends:
        ends.replace(lambda path: Dying(path, after=after))
        await push_whole(ends, batches=2)
        (report,) = ends.p.link(ends.d).reports
        assert (report.rank, report.problem) == (0, "planted")


class Ended:
    """A path that is broken before its second batch, behind its back."""

    def __init__(self, path: Any, end: Callable[[], None]) -> None:
        self.path = path
        self.transport = path.transport
        self.batches = 0
        self.end = end
        self.takes = path.takes
        self.close = path.close

    async def carry(self, batch: Batch) -> int:
        self.batches += 1
        if self.batches == 2:
            self.end()
            if self.transport is Transport.SHM:
                await until(self.path._link.over.done)
        restarts: int = await self.path.carry(batch)
        return restarts


def break_path(ends: Ends, visits: list[Visit]) -> None:
    """Break what the path is made of: its links, at the receiver; of NIXL, which has none, the arenas' registrations.

    Those at both ends: what was registered at the receiver alone may be written to as long as it is mapped there.
    """
    for agent in (ends.p.daemon._agent, ends.d.daemon._agent) if ends.kind is Transport.NIXL else ():
        assert agent is not None
        for arena, _ in list(agent._registered.values()):
            agent.withdraw(arena)
    for visit in visits:
        for link in list(visit.links):
            link.close()


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_a_path_that_really_breaks_in_the_middle_is_replaced_by_the_next_one(
    tmp_path: Path, kind: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.store.paths.choice.RETRY_S", 3600.0)
    visits: list[Visit] = []
    admit = Reception.admit

    def noting(self: Reception, visit: Visit, message: Meet) -> Met:
        visits.append(visit)
        return admit(self, visit, message)

    monkeypatch.setattr(Reception, "admit", noting)
    async with ends_of(tmp_path, kind) as ends:
        wrapped: list[Ended] = []

        def wrap(path: Any) -> Ended:
            wrapped.append(Ended(path, lambda: break_path(ends, visits)))
            return wrapped[-1]

        ends.replace(wrap)
        await push_whole(ends, batches=3)
        assert wrapped[0].batches >= 2
        (report,) = ends.p.link(ends.d).reports
        assert (report.rank, bool(report.problem)) == (0, True)


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_a_path_that_was_lost_is_opened_again_and_carries_pages(
    tmp_path: Path, kind: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.store.paths.choice.RETRY_S", 0.02)
    async with ends_of(tmp_path, kind) as ends:
        first = ends.best()
        assert first is not None
        for number in range(2):
            ends.p.put(number)
        ends.p.push("t1", [0], 8, ends.d)
        await until(lambda: arrived(ends.d, [0]))
        paths = ends.p.link(ends.d)._paths
        assert paths is not None
        paths._give_up(first.path, "planted")
        await until(lambda: ends.best() is not None)
        ends.p.push("t2", [1], 8, ends.d)
        await until(lambda: arrived(ends.d, [1]))
        assert ends.transport("t2") is kind
        await ends.settled()


@pytest.mark.slow
async def test_the_end_of_the_sending_store_leaves_nothing_at_the_receiver(ends: Ends) -> None:
    ends.p.push("t", range(2), 16, ends.d)
    ref = ends.p.announce(0)
    ends.p.publish(0, ref, [0])
    await until(lambda: ends.d.page(0) is not None and ends.d.page(0).layers_in == 1)  # type: ignore[union-attr]
    await ends.p.stop()
    await until(lambda: ends.d.is_idle and not ends.are_warming)
    assert ends.d.page(0) is None
    ends.d.keeper.check_invariants()


@pytest.mark.parametrize("kind", DIRECT)
async def test_a_slot_that_a_lost_sender_may_still_write_into_rests_before_it_is_used_again(
    tmp_path: Path, kind: Transport
) -> None:
    async with ends_of(tmp_path, kind) as ends:
        ends.p.push("t", range(1), 8, ends.d)
        ends.p.publish(0, ends.p.announce(0), [0])
        await until(lambda: ends.d.page(0) is not None and ends.d.page(0).layers_in == 1)  # type: ignore[union-attr]
        page = ends.d.page(0)
        assert page is not None
        await ends.p.stop()
        await until(lambda: ends.d.page(0) is None)
        assert page.free_at > ends.d.now
        assert ends.d.shelf().arena.is_current(page.ref)


@pytest.mark.slow
async def test_closing_frees_every_descriptor(tmp_path: Path) -> None:
    open_after: list[int] = []
    for round_number in range(3):
        for kind in (CONTROL, Transport.TCP, Transport.SHM):
            folder = tmp_path / f"{round_number}-{kind}"
            folder.mkdir()
            async with ends_of(folder, kind) as ends:
                ends.p.put(0)
                ends.p.push("t", range(1), 8, ends.d)
                await until(lambda ends=ends: arrived(ends.d, [0]))  # type: ignore[misc]
        gc.collect()
        open_after.append(len(os.listdir("/proc/self/fd")))
    # What other tests left may be freed meanwhile, and a thread may be about to close its own.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= open_after[1])


# ---------------------------------------------------------------- the choice


async def test_the_fastest_path_that_passed_its_test_is_taken_and_the_others_are_ranked(tmp_path: Path) -> None:
    async with ends_of(tmp_path, Transport.TCP) as ends:
        ends.p.daemon.peers._config = StoreConfig(transports=(Transport.SHM, Transport.TCP))
        ends.p.daemon.peers._links.clear()
        ends.p.daemon.peers.meet([ends.d.address])
        await until(lambda: len(ends.p.link(ends.d).reports) == 2 and ends.p.link(ends.d).reports[1].rank == 2)
        first, second = ends.p.link(ends.d).reports
        assert {first.transport, second.transport} == {Transport.SHM, Transport.TCP}
        assert min(first.bytes_per_s, second.bytes_per_s, first.latency_s, second.latency_s) > 0
        assert first.latency_s + (4 << 20) / first.bytes_per_s <= second.latency_s + (4 << 20) / second.bytes_per_s


async def test_a_path_whose_package_is_missing_here_says_so_rather_than_blame_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.store.peers.find_spec", lambda name: None)
    async with ends_of(tmp_path, Transport.TCP) as ends:
        ends.p.daemon.peers._config = StoreConfig(transports=(Transport.NIXL, Transport.TCP))
        ends.p.daemon.peers._links.clear()
        ends.p.daemon.peers.meet([ends.d.address])
        await until(lambda: [each.rank for each in ends.p.link(ends.d).reports] == [1, 0])
        assert ends.p.link(ends.d).reports[1].problem == "NIXL is not installed here; pip install 'kvrelay[nixl]'"


async def test_a_path_that_damages_the_test_pattern_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.store.inbound.checksums", lambda run, size: [0])
    ends = Ends(tmp_path, Transport.TCP)
    await ends.ready()
    ends.p.daemon.peers.meet([ends.d.address])
    await until(lambda: "pattern" in ends.p.link(ends.d).reports[0].problem if ends.p.link(ends.d).reports else 0)
    assert ends.best() is None
    ends.p.put(0)
    ends.p.push("t", range(1), 8, ends.d)
    await until(lambda: arrived(ends.d, [0]))
    await ends.p.stop()
    await ends.d.stop()


async def test_paths_are_tested_again_while_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.store.paths.choice.RETEST_S", 0.02)
    async with ends_of(tmp_path, Transport.TCP) as ends:
        first = ends.best()
        await until(lambda: ends.best() not in (None, first))
        monkeypatch.setattr("kvrelay.store.inbound.checksums", lambda run, size: [0])
        await until(lambda: ends.best() is None)
        (report,) = ends.p.link(ends.d).reports
        assert (report.rank, "pattern" in report.problem) == (0, True)


class Timed:
    """A path on a clock of its own."""

    transport = Transport.TCP

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self._seconds = list(seconds)

    async def probe(self, pattern: memoryview) -> bool:
        self.sizes.append(len(pattern))
        self.now += self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        return True


async def test_the_shortest_of_three_probes_counts_so_that_a_busy_moment_does_not() -> None:
    path: Any = Timed(*[0.001] * 4, 0.5, 0.001, 0.4, 0.3, 0.002, 0.002, 0.5, 0.5, 0.004)
    score = await prove(path, lambda: path.now)
    assert score.latency_s == pytest.approx(0.001)
    assert score.bytes_per_s == pytest.approx(MAX_PROBE_BYTES / 0.004)


async def test_a_slow_link_is_not_filled_with_probes() -> None:
    path: Any = Timed(0.05)
    score = await prove(path, lambda: path.now)
    assert max(path.sizes) == 64 << 10
    assert score.bytes_per_s == pytest.approx((64 << 10) / 0.05)
