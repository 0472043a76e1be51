"""What the brain knows right now, as metric readings. It must never change what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvrelay.channel import Listener
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.health import cut_off, stranded
from kvrelay.fleet.index import store_key
from kvrelay.policy.breaker import State
from kvrelay.protocol.client import LinkReport
from kvrelay.router.clients import Clients
from kvrelay.router.desk import Desk
from kvrelay.router.shortage import Shortage

Reading = tuple[str, str, dict[str, str], float]


class BrainReadings:
    """Reads one brain; see ``telemetry.Readings``."""

    def __init__(self, brain: Brain, clock: Callable[[], float], clients: Clients, shortage: Shortage) -> None:
        self._brain = brain
        self._clock = clock
        self._clients = clients
        self._shortage = shortage
        self.listener: Listener | None = None
        """The control port, once it listens."""
        self.desk: Desk | None = None
        """Answers that are being written, once it is open."""

    def __repr__(self) -> str:
        return f"<BrainReadings of {self._brain!r}>"

    def read(self) -> Iterator[Reading]:
        brain, fleet = self._brain, self._brain.fleet
        stale = fleet.workers.stale_heartbeats + fleet.stores.stale_heartbeats
        ghosts = fleet.workers.refused + fleet.stores.refused
        yield "kvrelay_in_flight", "Requests in flight.", {}, brain.in_flight
        yield "kvrelay_stale_heartbeats_total", "Heartbeats of unknown or dead incarnations.", {}, stale
        yield "kvrelay_unknown_transfers_total", "Milestones of unknown transfers.", {}, brain.milestones.unknown
        opened = self._brain.outcomes.breakers.opened
        yield "kvrelay_breakers_opened_total", "Times that failures began to keep requests away.", {}, opened
        yield "kvrelay_registrations_refused_total", "Registrations under the name of a live member.", {}, ghosts
        door = self._brain.door
        yield "kvrelay_waiting", "Requests that wait in the router for their turn.", {}, len(door.waiting)
        for kind, count in sorted(door.refused.items()):
            yield "kvrelay_refused_total", "Requests turned away, by kind.", {"kind": kind}, count
        yield from self._connections()
        yield from self._recovery()
        yield from self._predictions()
        yield from self._prefixes()
        yield from self._control()
        yield from self._index()
        yield from self._workers()
        yield from self._stranded()
        yield from self._broken_ways()
        yield from self._stores()

    def _connections(self) -> Iterator[Reading]:
        yield "kvrelay_client_connections", "Connections of clients.", {}, len(self._clients)
        yield "kvrelay_client_connections_limit", "Most of them.", {}, self._clients.most
        for ending, count in sorted(self._clients.endings.items()):
            labels = {"reason": ending.value}
            yield "kvrelay_client_connections_ended_total", "Those that the router ended, by reason.", labels, count
        for lack, count in sorted(self._shortage.counts.items()):
            labels = {"of": lack.value}
            yield "kvrelay_router_shortages_total", "Times that the router itself was short of it.", labels, count

    def _recovery(self) -> Iterator[Reading]:
        recovery, kept = self._brain.recovery, self.desk.journal_tokens if self.desk is not None else 0
        yield "kvrelay_journal_tokens", "Tokens kept of answers in flight, to go on from elsewhere.", {}, kept
        yield "kvrelay_resumes_waiting", "Answers without a decode worker that wait for their turn.", {}, len(recovery)
        stalls = self._brain.silences.stalls
        yield "kvrelay_stalls_total", "Workers found to make no progress with their work.", {}, stalls
        ended = self._brain.poison_requests.ended
        yield "kvrelay_harmful_requests_total", "Requests ended since one worker after the other failed.", {}, ended

    def _predictions(self) -> Iterator[Reading]:
        seen = self._brain.outcomes.calibration
        for what in ("ttft", "tpot"):
            for quantile in ("0.5", "0.9"):
                labels = {"what": what, "quantile": quantile}
                error = seen.error(what, float(quantile))
                yield "kvrelay_prediction_error_ratio", "|predicted - seen| / seen, last 256 requests.", labels, error
        yield "kvrelay_predictions_total", "Requests whose first token was predicted and seen.", {}, seen.predictions
        for worker, law, error in self._brain.experience.errors():
            labels = {"worker": worker, "law": law.value}
            yield "kvrelay_law_error_ratio", "Median |predicted - seen| / seen of a law's last 64.", labels, error
        lost = seen.regret_s
        yield "kvrelay_regret_seconds_total", "First tokens later than the best runner-up's prediction.", {}, lost

    def _prefixes(self) -> Iterator[Reading]:
        waits, pulls = self._brain.waits, self._brain.prefixes.pulls
        yield "kvrelay_prefix_held", "Prompts that wait for a prefix now.", {}, len(self._brain.prefixes.holds)
        for (kind, ending), count in sorted(waits.endings.items()):
            labels = {"source": kind.value, "ending": ending.value}
            yield "kvrelay_prefix_waits_total", "Waits for a prefix, by source and ending.", labels, count
        for kind, seconds in sorted(waits.waited_s.items()):
            labels = {"source": kind.value}
            yield "kvrelay_prefix_wait_seconds_total", "Time that prompts waited for a prefix.", labels, seconds
        for ending, count in sorted(pulls.endings.items()):
            labels = {"ending": ending.value}
            yield "kvrelay_pulls_total", "Prefixes pulled from one store to another, by ending.", labels, count
        yield "kvrelay_pull_bytes_total", "Bytes of pulled prefixes that crossed between stores.", {}, pulls.moved_bytes
        copies = self._brain.copies.counts
        for end, count in (("made", copies.made), ("lost", copies.lost), ("declined", copies.declined)):
            labels = {"ending": end}
            yield "kvrelay_copies_total", "Second copies of running answers' pages, by ending.", labels, count
        yield "kvrelay_copied_bytes_total", "Bytes of second copies that crossed between stores.", {}, copies.bytes

    def _control(self) -> Iterator[Reading]:
        links = self.listener
        crashed, refused = (links.crashed, links.refused) if links else (0, 0)
        yield "kvrelay_links_crashed_total", "Links of members that an error of the router ended.", {}, crashed
        yield (
            "kvrelay_links_refused_total",
            "Callers of the control port that failed the handshake, or said what is no message.",
            {},
            refused,
        )

    def _index(self) -> Iterator[Reading]:
        index = self._brain.index
        yield "kvrelay_index_pages", "Page names in the router's index.", {}, len(index)
        yield "kvrelay_index_gaps_total", "Times that page events were missing.", {}, index.gaps
        yield "kvrelay_index_stale_total", "Page events of dead incarnations.", {}, index.stale
        yield "kvrelay_index_turned_away_total", "Pages without room in the index.", {}, index.turned_away

    def _workers(self) -> Iterator[Reading]:
        loads, now = self._brain.loads, self._clock()
        for member in self._brain.fleet.workers:
            name = member.info.name
            who = {"worker": name, "role": member.info.role.value}
            ready = self._brain.fleet.workers.is_usable(name, now)
            yield "kvrelay_worker_ready", "1 when the worker gets work.", who, ready
            yield (
                "kvrelay_worker_draining",
                "1 when it is to become empty.",
                who,
                member.draining,
            )
            shut = self._brain.outcomes.breakers.of(name).state is not State.CLOSED
            yield "kvrelay_worker_breaker_open", "1 when its failures keep requests away.", who, shut
            yield "kvrelay_prefill_queued_tokens", "Uncached tokens promised to P.", who, loads.queued_tokens[name]
            yield "kvrelay_decode_sequences", "Sequences promised by D.", who, loads.sequences[name]
            yield "kvrelay_decode_kv_tokens", "KV promised by D, in tokens.", who, loads.kv_tokens[name]
            yield "kvrelay_worker_pages", "Pages that the worker reported.", who, self._brain.index.count(name)
            yield from _counts("worker", name, member.counts)

    def _broken_ways(self) -> Iterator[Reading]:
        ways = self._brain.fleet.ways
        yield "kvrelay_broken_ways", "Ways from one store to another that no transfer gets over.", {}, len(ways)
        yield "kvrelay_ways_broken_total", "Times that a way was found broken.", {}, ways.opened
        for way in ways.broken():
            labels = {"store": way.source, "peer": way.target}
            yield "kvrelay_way_broken", "1: transfers fail from store to peer, and none is sent but probes.", labels, 1
        for name in sorted(cut_off(self._brain, self._clock())):
            yield "kvrelay_worker_cut_off", "1: no way from or to its store lets pages through.", {"worker": name}, 1

    def _stranded(self) -> Iterator[Reading]:
        for row in stranded(self._brain, self._clock()):
            who = {"worker": row["worker"], "field": row["reason"]}
            yield (
                "kvrelay_worker_stranded",
                "1: no other worker can exchange KV with it; by field.",
                who,
                1,
            )

    def _stores(self) -> Iterator[Reading]:
        now = self._clock()
        for member in self._brain.fleet.stores:
            name = member.info.name
            ready = self._brain.fleet.stores.is_usable(name, now)
            yield "kvrelay_store_ready", "1 when the store is heard.", {"store": name}, ready
            pages = self._brain.index.count(store_key(name))
            yield "kvrelay_store_pages", "Pages that the store reported.", {"store": name}, pages
            yield from _counts("store", name, member.counts)
            yield from self._ways(name, member.ways)

    def _ways(self, store: str, ways: Iterable[LinkReport]) -> Iterator[Reading]:
        """How one store reaches the others; a peer that no router knows goes by its address."""
        names = {member.info.address: member.info.name for member in self._brain.fleet.stores}
        for way in ways:
            labels = {"store": store, "peer": names.get(way.peer, way.peer), "transport": way.transport.value}
            yield "kvrelay_link_rank", "1: pages go this way; 2, ...: when those fail; 0: not used.", labels, way.rank
            yield "kvrelay_link_bytes_per_second", "Speed of a path in its test.", labels, way.bytes_per_s
            yield "kvrelay_link_latency_seconds", "Round trip of a path in its test.", labels, way.latency_s


def _counts(kind: str, name: str, counts: dict[str, int]) -> Iterator[Reading]:
    """What a member counts itself, as its last heartbeat said."""
    for count, value in counts.items():
        labels = {kind: name, "count": count}
        yield f"kvrelay_{kind}_count", f"Counts and gauges that each {kind} reports of itself.", labels, value
