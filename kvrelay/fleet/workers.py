"""Who is alive: leases kept by heartbeats, incarnations, and which workers may be paired. It must never guess:
a member that is silent, unhealthy or of an old incarnation gets no work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic

from kvrelay.errors import Malformed, Refused
from kvrelay.fleet.member import STALLED_S, Info, Member
from kvrelay.fleet.ways import Ways
from kvrelay.identity import ByConversion, Exact, Unlike, can_exchange
from kvrelay.policy.patience import SILENT_LEASES
from kvrelay.protocol.client import LinkReport
from kvrelay.types import Role, StoreInfo, Value, WorkerInfo

MAX_MEMBERS = 1024
FORGET_S = 600.0
"""How long a dead member stays visible in health."""
MAX_COUNTS = 256
MAX_WAYS = 1024
MAX_REMEMBERED_PAIRS = 16_384


class Roster(Generic[Info]):
    """All members of one kind, by name."""

    def __init__(self, dead_after_s: float, *, linked: bool = False) -> None:
        """``linked``: a member without a link gets no work until it dials again; otherwise the lease alone decides."""
        self._dead_after_s = dead_after_s
        self._linked = linked
        self._members: dict[str, Member[Info]] = {}
        self._ready: tuple[Info, ...] = ()
        """Usable members, and from when until when (excluded) they are, unless somebody is heard: asking each one takes
        longer than a choice among them."""
        self._ready_from_s, self._ready_until_s = math.inf, -math.inf
        self.stale_heartbeats = 0
        """Heartbeats of unknown members or old incarnations."""
        self.refused = 0
        """Registrations under the name of a member that lives."""

    def __repr__(self) -> str:
        return f"<Roster {', '.join(sorted(self._members)) or 'empty'}>"

    def __iter__(self) -> Iterator[Member[Info]]:
        return iter([self._members[name] for name in sorted(self._members)])

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member[Info] | None:
        return self._members.get(name)

    def register(self, info: Info, now: float) -> bool:
        """Add or replace a member; True when another incarnation of it was known. Raises ``Malformed``, ``Refused``.

        A member that lives keeps its name: who comes with another incarnation is its ghost, woken from a pause, or
        somebody with the same name. It may come again once the lease ran out, the link broke or a goodbye was said.
        """
        old = self._members.get(info.name)
        if old is None and len(self._members) >= MAX_MEMBERS:
            raise Malformed(f"{MAX_MEMBERS} members are registered already; stop some before starting {info.name}")
        same = old is not None and old.info.incarnation == info.incarnation
        if old is not None and not same and old.links > 0 and old.alive(now, self._dead_after_s):
            self.refused += 1
            raise Refused(f"{info.name} is registered and lives; stop it, or start this one under another name")
        member = self._members[info.name] = Member(info=info, heard_s=now, well_s=now, progress_s=now)
        self.look_again()
        if old is not None and same:
            member.links, member.stalled_s = old.links, old.stalled_s
            member.drain, member.told_drain = old.drain, old.told_drain
            if old.progress is not None:  # to dial again is none
                member.progress, member.progress_s = old.progress, old.progress_s
        return old is not None and not same

    def link(self, name: str, incarnation: str, opened: int) -> None:
        """A link over which a member registered is open (1) or has ended (-1). The lease decides whether it lives."""
        member = self._members.get(name)
        if member is not None and member.info.incarnation == incarnation:
            member.links += opened
            member.cut = member.links == 0
            self.look_again()

    def hear(
        self,
        name: str,
        incarnation: str,
        *,
        healthy: bool,
        counts: dict[str, int],
        now: float,
        ways: Sequence[LinkReport] = (),
        progress: int | None = None,
    ) -> bool:
        """Renew a member's lease; False when it is not the current incarnation's to renew."""
        member = self._current(name, incarnation)
        if member is None:
            return False
        was_usable = self._usable(member, now)
        member.heard_s, member.healthy, member.lost = now, healthy, False
        if healthy:
            member.well_s = now
        member.counts = dict(list(counts.items())[:MAX_COUNTS])
        member.ways = tuple(ways[:MAX_WAYS])
        member.made_progress(progress, now)
        if self._usable(member, now) is not was_usable:
            self.look_again()
        return True

    def silent_s(self, name: str, now: float) -> float:
        """Seconds without a sign that the member works; infinite for one that is gone."""
        member = self._members.get(name)
        return math.inf if member is None or member.left else now - member.progress_s

    def unwell_s(self, name: str, now: float) -> float:
        """Seconds since a member that says that it is not healthy was; 0 for any other."""
        member = self._members.get(name)
        return 0.0 if member is None or member.healthy else now - member.well_s

    def still(self, incarnations: Mapping[str, str]) -> set[str]:
        """Names in ``incarnations`` whose members were not restarted since, as far as is known."""
        members = ((name, self._members.get(name)) for name in incarnations)
        return {name for name, it in members if it is not None and it.info.incarnation == incarnations[name]}

    def stall(self, name: str, now: float) -> None:
        """The member has work and makes no progress: it gets no more for a while."""
        member = self._members.get(name)
        if member is not None and member.stalled_s is None:
            member.stalled_s = now
            self.look_again()

    def leave(self, name: str, incarnation: str) -> bool:
        """A clean goodbye; False when it was not the current incarnation's."""
        member = self._current(name, incarnation)
        if member is not None:
            member.left = member.lost = True
            self.look_again()
        return member is not None

    def _current(self, name: str, incarnation: str) -> Member[Info] | None:
        member = self._members.get(name)
        if member is None or member.info.incarnation != incarnation:
            self.stale_heartbeats += 1
            return None
        return member

    def usable(self, now: float) -> tuple[Info, ...]:
        """Members that may get work, by name; the same object as long as they are the same."""
        if not self._ready_from_s <= now < self._ready_until_s:
            self._survey(now)
        return self._ready

    def look_again(self) -> None:
        """A member has changed: the usable ones have to be listed again."""
        self._ready_until_s = -math.inf

    def _survey(self, now: float) -> None:
        usable = [member for member in self if self._usable(member, now)]
        ready = tuple(member.info for member in usable)
        if ready != self._ready:
            self._ready = ready
        ends_s = [max(now, member.heard_s + self._dead_after_s) for member in usable]
        ends_s += [member.stalled_s + STALLED_S for member in self if member.stalled_s is not None]
        self._ready_from_s = now
        self._ready_until_s = min((end_s for end_s in ends_s if end_s >= now), default=math.inf)

    def is_usable(self, name: str, now: float) -> bool:
        member = self._members.get(name)
        return member is not None and self._usable(member, now)

    def _usable(self, member: Member[Info], now: float) -> bool:
        return member.usable(now, self._dead_after_s) and not (self._linked and member.cut)

    def is_alive(self, name: str, now: float) -> bool:
        member = self._members.get(name)
        return member is not None and member.alive(now, self._dead_after_s)

    def expire(self, now: float) -> list[Info]:
        """Members whose silence is news; those long dead are forgotten."""
        silent = [member for member in self if not member.lost and not member.alive(now, self._dead_after_s)]
        for member in silent:
            member.lost = True
        for member in self:
            if member.lost and now - member.heard_s > FORGET_S:
                del self._members[member.info.name]
        return [member.info for member in silent]

    def given_up(self, now: float) -> list[Info]:
        """Members without a sign of health for so long that nobody should wait for a word of them that is late."""
        return [member.info for member in self if self._is_given_up(member, now)]

    def is_given_up(self, name: str, now: float) -> bool:
        """Whether it is one of those."""
        member = self._members.get(name)
        return member is not None and self._is_given_up(member, now)

    def _is_given_up(self, member: Member[Info], now: float) -> bool:
        return now - member.well_s > SILENT_LEASES * self._dead_after_s


class Handoff(Value, frozen=True, kw_only=True):
    """P and D can be paired; ``push_to`` is the address of D's store, None when they share one."""

    push_to: str | None
    converts: bool = False
    """D converts P's pages to its own KV type: answers are near those of one worker, not equal."""


class NoHandoff(Value, frozen=True, kw_only=True):
    """P and D cannot be paired; ``reason`` names the field that differs or the store that is missing."""

    reason: str
    cut: bool = False
    """The broken way between their stores is the only reason."""


class Fleet:
    """Workers and stores together, and which pairs of workers can hand KV over."""

    def __init__(self, dead_after_s: float, *, convert_kv_dtype: bool = False) -> None:
        self.workers: Roster[WorkerInfo] = Roster(dead_after_s)
        # A store that is killed is noticed by its link, at once: prompts are computed elsewhere until it is back, and
        # that costs less than the lease of one that only lost its link.
        self.stores: Roster[StoreInfo] = Roster(dead_after_s, linked=True)
        self.ways = Ways()
        self.converts_kv_dtype = convert_kv_dtype
        """Whether the operator lets decode workers convert KV of another type."""
        self._exchanges: dict[tuple[str, str, str, str], Exact | ByConversion | Unlike] = {}
        """Comparisons of two incarnations each; comparing fingerprints for every request would cost 20 us a pair."""

    def __repr__(self) -> str:
        return f"<Fleet workers={self.workers!r} stores={self.stores!r}>"

    def register_worker(self, worker: WorkerInfo, now: float) -> bool:
        """See ``Roster.register``. What was known of its pairs is forgotten: its weights may have changed."""
        self._exchanges.clear()
        return self.workers.register(worker, now)

    def serving(self, model: str, now: float) -> list[WorkerInfo]:
        """Usable workers of one model."""
        return [info for info in self.workers.usable(now) if info.model == model]

    def models(self) -> list[str]:
        """Models of all workers that did not say goodbye, ready or not."""
        return sorted({member.info.model for member in self.workers if not member.left})

    def max_model_len(self, model: str) -> int:
        """Tokens of prompt and answer that each worker of ``model``, one of ``models()``, takes."""
        members = [member for member in self.workers if member.info.model == model and not member.left]
        return min(member.info.engine.max_model_len for member in members)

    def longest_context(self, model: str) -> int:
        """Most tokens of prompt and answer that any worker of ``model`` takes which can write, ready or not."""
        members = [member for member in self.workers if member.info.model == model and not member.left]
        return max((each.info.engine.max_model_len for each in members if each.info.role.decodes), default=0)

    def pair(self, prefill: WorkerInfo, decode: WorkerInfo, now: float) -> Handoff | NoHandoff:
        """Whether ``prefill`` can hand its pages to ``decode`` now."""
        if prefill.name == decode.name or prefill.role is decode.role is Role.BOTH:
            return NoHandoff(reason="colocated")
        match self._exchange(prefill, decode):
            case Unlike(field=field_name):
                return NoHandoff(reason=f"fingerprint.{field_name}")
            case ByConversion() if not self.converts_kv_dtype:
                return NoHandoff(reason="fingerprint.format.dtype")
            case exchange:
                return self._way(prefill, decode, isinstance(exchange, ByConversion), now)

    def _way(self, prefill: WorkerInfo, decode: WorkerInfo, converts: bool, now: float) -> Handoff | NoHandoff:
        for store in (prefill.store, decode.store):
            if not self.stores.is_usable(store, now):
                return NoHandoff(reason=f"store {store} is not ready")
        if not self.ways.allows((prefill.store, decode.store), now):
            return NoHandoff(reason=f"transfers from {prefill.store} to {decode.store} fail", cut=True)
        push_to = None if prefill.store == decode.store else self._address(decode.store)
        return Handoff(push_to=push_to, converts=converts)

    def _exchange(self, prefill: WorkerInfo, decode: WorkerInfo) -> Exact | ByConversion | Unlike:
        key = (prefill.name, prefill.incarnation, decode.name, decode.incarnation)
        if key not in self._exchanges:
            if len(self._exchanges) >= MAX_REMEMBERED_PAIRS:
                self._exchanges.clear()
            self._exchanges[key] = can_exchange(prefill.engine.fingerprint, decode.engine.fingerprint)
        return self._exchanges[key]

    def _address(self, store: str) -> str | None:
        member = self.stores.get(store)
        return member.info.address if member else None
