"""Which prefixes are being computed or pulled, and which prompts are held back for them: one owner for the parts. It
must never hold a prompt for a prefix that no work brings."""

from __future__ import annotations

import math

from kvrelay.fleet.flight import PrefillOrder, PullPages
from kvrelay.fleet.holdings import Holdings
from kvrelay.fleet.holds import Ending, Hold, Holds
from kvrelay.fleet.index import store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.prefix_finder import PrefixFinder
from kvrelay.fleet.pulls import Pull, Pulls
from kvrelay.fleet.underway import Underway, Work
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.cost import Item, Kind
from kvrelay.policy.patience import HOLD_S, held_until_s
from kvrelay.policy.route import Option
from kvrelay.protocol.feed import PushOrder, TransferEvent
from kvrelay.types import PageName, Value, WorkerInfo


class Outgoing(Value, frozen=True, kw_only=True):
    """One prompt on its way to the worker that is to compute it."""

    request_id: str
    index: int
    key: str
    """Key of the prompt's own work: its transfer, or the request's id where D computes it."""
    computed_on: WorkerInfo
    tokens: int
    names: tuple[PageName, ...]
    """Names of the prompt's pages, as ``computed_on`` calls them; empty when they are unknown."""
    stores: tuple[str, ...]
    """Where its pages will be."""
    option: Option
    order: PrefillOrder | None

    @property
    def page_tokens(self) -> int:
        return self.computed_on.engine.fingerprint.format.page_tokens

    @property
    def whole(self) -> tuple[PageName, ...]:
        """Names of its full pages."""
        return self.names[: self.tokens // self.page_tokens]

    @property
    def cached(self) -> int:
        """Full pages that it is predicted not to compute. Of a prompt that is all there, its last token is."""
        return min(len(self.whole), math.ceil(self.option.cached_tokens / self.page_tokens))


class PrefixHold(Value, frozen=True, kw_only=True):
    """A prompt that is held back; ``pull`` is the order to a store, where the prefix is pulled."""

    hold: Hold
    pull: PullPages | None = None


class Prefixes:
    """The works, holds and pulls of one router, changed together."""

    def __init__(self, fleet: Fleet, links: Links, holdings: Holdings, longest_s: float) -> None:
        self._fleet = fleet
        self._holdings = holdings
        self._links = links
        self.underway = Underway()
        self.holds = Holds()
        self.pulls = Pulls(links, holdings)
        self.finder = PrefixFinder(fleet, links, self.underway, self.holds, self.pulls, longest_s)

    def __repr__(self) -> str:
        return f"<Prefixes {self.underway!r}, {self.holds!r}, {self.pulls!r}>"

    # ------------------------------------------------------------ beginning

    def begin(self, prompt: Outgoing, now: float) -> PrefixHold | None:
        """A prompt is to be computed as its option says: how it is held back; None when it is not."""
        held = self._hold_back(prompt, now)
        items = dict(prompt.option.items)
        begin_s = now + items.get(Item.QUEUE, items[Item.DECODE_WAIT]) + items[Item.SOURCE]
        self.underway.begin(
            Work(
                key=prompt.key,
                names=prompt.whole,
                first=prompt.cached,
                worker=prompt.computed_on.name,
                stores=frozenset(map(store_key, prompt.stores)),
                begin_s=begin_s,
                seconds=items[Item.PREFILL],
            )
        )
        return held

    def _hold_back(self, prompt: Outgoing, now: float) -> PrefixHold | None:
        kind, origin = prompt.option.source
        if kind is Kind.UNDERWAY:
            work = self.underway.get(origin)
            if work is None or self._comes_by_itself(prompt, work):
                return None
            return PrefixHold(hold=self._hold(prompt, work, now))
        if kind is Kind.PEER:
            return self._pull(prompt, origin, now)
        return None

    def _comes_by_itself(self, prompt: Outgoing, work: Work) -> bool:
        """Its worker computes it before, since it computes prompts one after the other."""
        return work.worker == prompt.computed_on.name and not prompt.computed_on.engine.lets_pass

    def _hold(self, prompt: Outgoing, work: Work, now: float) -> Hold:
        predicted_s = HOLD_S + work.remaining_s(prompt.cached, now)
        hold = Hold(
            request_id=prompt.request_id,
            index=prompt.index,
            kind=prompt.option.source.kind,
            work=work.key,
            worker=work.worker,
            page=prompt.whole[prompt.cached - 1],
            reach=frozenset((prompt.computed_on.name, store_key(prompt.computed_on.store))),
            computed_on=prompt.computed_on.name,
            seconds=dict(prompt.option.items)[Item.PREFILL],
            since_s=now,
            predicted_s=predicted_s,
            until_s=held_until_s(now, predicted_s),
            order=prompt.order,
        )
        self.holds.add(hold)
        return hold

    def _pull(self, prompt: Outgoing, source: str, now: float) -> PrefixHold | None:
        target = self._fleet.stores.get(prompt.computed_on.store)
        if target is None:
            return None
        form, names = prompt.computed_on.engine.fingerprint.format, prompt.whole[: prompt.cached]
        first = min(self._holdings.stored(prompt.computed_on, names), len(names) - 1)
        size_bytes = (len(names) - first) * form.page_bytes
        seconds = self._links.seconds(source, prompt.computed_on.store, size_bytes)
        pull = Pull(
            transfer=self.pulls.next_transfer(prompt.key),
            source=source,
            target=prompt.computed_on.store,
            names=names,
            format=form,
            size_bytes=size_bytes,
            begun_s=now,
            until_s=held_until_s(now, HOLD_S + seconds),
        )
        work = Work(
            key=pull.transfer,
            names=names,
            first=first,
            worker=None,
            stores=frozenset((store_key(pull.target),)),
            begin_s=now,
            seconds=seconds,
        )
        self.pulls.begin(pull)
        self._fleet.ways.sent(pull.transfer, (source, pull.target), now)
        self.underway.begin(work)
        hold = self._hold(prompt, work, now)
        order = PushOrder(
            transfer=pull.transfer,
            names=list(names),
            total_tokens=len(names) * form.page_tokens,
            format=form,
            push_to=target.info.address,
        )
        return PrefixHold(hold=hold, pull=PullPages(request_id=prompt.request_id, store=source, order=order))

    # ------------------------------------------------------------ what happens to works

    def over(self, key: str) -> list[Hold]:
        """A work is over: release the prompts that waited for it."""
        self.underway.end(key)
        return self.holds.take_work(key)

    def heard(self, event: TransferEvent, now: float) -> tuple[list[Hold], Ending]:
        """A store reported a milestone of a pull: the prompts that wait for it no more, and how their wait ended."""
        ending = self.pulls.heard(event, now)
        return ([], Ending.CAME) if ending is None else (self.over(event.transfer), ending)

    def overdue(self, now: float) -> list[Hold]:
        """Release the prompts that waited long enough, or for a pull that took too long."""
        late = self.holds.take_overdue(now)
        for transfer in self.pulls.expire(now):
            late += self.over(transfer)
        return late

    def cut_off(self, now: float) -> list[Hold]:
        """Release the prompts that wait for a pull of which one end is gone."""
        usable = self._fleet.stores.is_usable
        cut = [pull.transfer for pull in self.pulls if not (usable(pull.source, now) and usable(pull.target, now))]
        for transfer in cut:
            self.pulls.lose(transfer, now)
        return [hold for transfer in cut for hold in self.over(transfer)]

    def check_invariants(self) -> None:
        """Raise AssertionError unless every held prompt waits for work that goes on."""
        self.underway.check_invariants()
        works = {hold.work for hold in self.holds}
        pulls = {pull.transfer for pull in self.pulls}  # of which nobody is told while too much is under way
        assert all(work in pulls or self.underway.get(work) is not None for work in works), "a prompt waits for nothing"
