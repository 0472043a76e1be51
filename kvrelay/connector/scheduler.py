"""The scheduler half: decides what is loaded and saved. It holds no block, and no step beyond a lookup's grace."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvrelay import identity
from kvrelay.connector.engine import EngineRequest, has_plain_identity
from kvrelay.connector.fresh import FreshPages
from kvrelay.connector.grace import Grace
from kvrelay.connector.handoffs import Handoffs
from kvrelay.connector.lookup import Lookup
from kvrelay.connector.plan import LoadJob, PageCopy, SaveJob, StepPlan
from kvrelay.connector.saves import SaveProgress
from kvrelay.connector.search import Found, Search, foreign_types
from kvrelay.connector.tracked import Tracked
from kvrelay.connector.unfilled import PlannedPages
from kvrelay.protocol.client import NewPage
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg
from kvrelay.store.client import StoreClient
from kvrelay.types import Engine, PageFormat, PageName, SlotRef


class SchedulerHalf:
    """Lives in vLLM's engine process; every method is called from its scheduling thread."""

    def __init__(
        self,
        client: StoreClient,
        engine: Engine,
        *,
        owner: str,
        load_wait_s: float,
        fill_wait_s: float = 0.0,
        free_blocks: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._engine = engine
        self._owner = owner
        self._load_wait_s = load_wait_s
        self._clock = clock
        self._grace = Grace(clock)
        self._page_tokens = engine.fingerprint.format.page_tokens
        self._requests: dict[str, Tracked] = {}
        self._new_loads: list[LoadJob] = []
        self._cancels: list[str] = []
        self._late: list[tuple[EngineRequest, Tracked, list[int], int]] = []
        self._fresh = FreshPages()
        self._planned = PlannedPages(fill_wait_s)
        self._handoffs = Handoffs(client, self._page_tokens)
        self.free_blocks = free_blocks
        """Free blocks of the engine's pool; None until vLLM binds it."""

    def __repr__(self) -> str:
        loading = sum(tracked.load is not None for tracked in self._requests.values())
        return f"<SchedulerHalf {len(self._requests)} requests, {loading} loading>"

    # ------------------------------------------------------------ arrival

    def on_new_request(self, request: EngineRequest) -> None:
        """Start the search for its pages, and open its transfer."""
        if not has_plain_identity(request) or request.num_tokens == 0:
            return
        leg = self._handoffs.read(request)
        foreign = foreign_types(self._engine.fingerprint, leg.page_dtypes if isinstance(leg, DecodeLeg) else ())
        salt = identity.exact_salt(request.cache_salt or "") if foreign else request.cache_salt or ""
        root = identity.root_name(self._engine.fingerprint, salt=salt)
        transfer = leg.transfer if isinstance(leg, PrefillLeg) else None
        saves = SaveProgress(root, self._page_tokens, transfer, self._engine.page_writers)
        names = saves.names(request)
        transfers = leg.transfers if isinstance(leg, DecodeLeg) else []
        if foreign:
            # What its prefix is in the engine's cache may be converted, by this request or one before it.
            saves.stop()
        search = self._search(
            request, names, transfers, [(other.format, identity.root_name(other, salt=salt)) for other in foreign]
        )
        home = leg.home if isinstance(leg, DecodeLeg) else None
        self._requests[request.request_id] = Tracked(saves, search, transfers=tuple(transfers), home=home)
        if isinstance(leg, PrefillLeg):
            self._client.open_transfer(leg.transfer, names, request.num_prompt_tokens, leg.push_to)

    def _search(
        self,
        request: EngineRequest,
        names: list[PageName],
        transfers: list[str],
        foreign: Sequence[tuple[PageFormat, PageName]] = (),
    ) -> Search:
        """``foreign``: formats that may be converted, and the root of each."""

        def look(ending: str, names: list[PageName]) -> Lookup:
            lease = f"{self._owner}/{request.request_id}{ending}"
            now, wait_s = self._clock(), self._load_wait_s
            return Lookup(self._client, self._grace, lease, names, transfers, now=now, wait_s=wait_s)

        others = []
        for other, root in foreign:
            named = identity.name_pages(root, request.all_token_ids, self._page_tokens)
            others.append((other, look(f"/{other.dtype}", named)))
        return Search(look("", names), others)

    # ------------------------------------------------------------ admission

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> int | None:
        """How many tokens beyond ``local_tokens`` can be loaded; None: ask again next step.

        Has no effect that asking twice would change.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.no_load or request.num_tokens == 1:
            # Of a full hit vLLM computes the last token again. With one token that leaves none computed, and
            # it would ask here and load for ever.
            return 0
        if tracked.search is None:
            # Preempted, and back: the answer of its first admission is stale.
            tracked.search = self._search(request, tracked.saves.names(request), [])
        if not tracked.search.settled(self._clock()):
            return None
        tokens = min(tracked.search.best().tokens, request.num_tokens) - local_tokens
        if tokens <= 0:
            return 0
        return None if self._lacks_room(request, tracked.search.own, local_tokens) else tokens

    def _lacks_room(self, request: EngineRequest, lookup: Lookup, local_tokens: int) -> bool:
        """Whether the load's blocks are not free now: answering would stop the queue behind this request.

        Bounded, so that small requests cannot overtake a large one for ever.
        """
        if self.free_blocks is None or lookup.age_s(self._clock()) > self._load_wait_s:
            return False
        needed = -(-(request.num_tokens - local_tokens) // self._engine.block_tokens)
        total = self._engine.kv_tokens // self._engine.block_tokens
        return self.free_blocks() < min(needed + 1, total)

    def allocated(self, request: EngineRequest, blocks: list[int], external_tokens: int) -> None:
        """Blocks exist: with ``external_tokens`` start the load, without drop the search."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.search is None:
            return
        search, tracked.search = tracked.search, None
        tracked.saves.mark_present(search.own.present(), request.num_tokens)
        self._handoffs.searched(search.best().lookup)
        if external_tokens == 0:
            search.release()
            return
        found = search.best()
        search.release(but=found)
        end = min(found.tokens, request.num_tokens)
        tracked.load = self._load_job(request, found, blocks, end - external_tokens, end)
        tracked.load_bad = set()
        tracked.load_names, tracked.lease = found.lookup.names, found.lookup.lease
        tracked.saves.mark_present(set(range(len(found.lookup.usable()))), request.num_tokens)
        self._new_loads.append(tracked.load)

    def _load_job(self, request: EngineRequest, found: Found, blocks: list[int], begin: int, end: int) -> LoadJob:
        pages = []
        for index, page in enumerate(found.lookup.usable()):
            start = index * self._page_tokens
            if start + page.tokens > begin:
                pages.append(PageCopy(page.slot.slot, page.slot.generation, start, page.tokens, page.shards))
        return LoadJob(request.request_id, list(blocks), pages, begin, end, found.format)

    # ------------------------------------------------------------ every step

    def build_plan(
        self, steps: Iterable[tuple[EngineRequest, list[int], int, int]], *, is_idle: bool = False
    ) -> StepPlan:
        """The plan of one step. ``steps``: request, its blocks, tokens computed before, tokens scheduled now.

        ``is_idle``: the engine computes nothing in it, of whatever request.
        """
        self._grace.renew(is_idle=is_idle)
        arena = self._client.arena
        plan = StepPlan(epoch=arena.epoch if arena is not None else 0)
        plan.loads, self._new_loads = self._new_loads, []
        plan.cancels, self._cancels = self._cancels, []
        self._suspect_unfilled()
        self._fresh.look_at(arena)
        plan.late_saves = self._plan_late(arena is not None)
        for request, blocks, computed, scheduled in steps:
            tracked = self._requests.get(request.request_id)
            if tracked is not None:
                self._plan_step(plan, request, tracked, blocks, computed + scheduled)
        planned = [SlotRef(page.slot, page.generation) for job in plan.saves + plan.late_saves for page in job.pages]
        self._planned.add(self._clock(), arena, planned)
        if self._client.arena is not arena:
            # The store came back while the plan was made: some of its slots are of the new arena, some of the old.
            plan.saves, plan.late_saves = [], []
            self._client.suspect(planned)  # those of the new one are known to it as being filled
        return plan

    def _suspect_unfilled(self) -> None:
        unfilled = self._planned.missing(self._clock(), self._client.arena)
        if unfilled:
            self._client.report({"saves_unfilled": len(unfilled)})
            self._client.suspect(unfilled)

    def _plan_step(
        self, plan: StepPlan, request: EngineRequest, tracked: Tracked, blocks: list[int], computed: int
    ) -> None:
        self._handoffs.begun(request, tracked)
        if plan.epoch:
            job = self._plan_saves(tracked, request, blocks, computed)
            plan.saves += [job] if job is not None else []
        # After the announcements: whoever hears of the last chunk finds all its pages.
        self._handoffs.scheduled(request, tracked, computed)

    def _plan_saves(self, tracked: Tracked, request: EngineRequest, blocks: list[int], computed: int) -> SaveJob | None:
        job, announced, short = tracked.saves.plan(request, blocks, computed, self._client, self._fresh)
        self._announce(announced, tracked.saves.transfer)
        if short:
            self._client.report({"pages_not_saved_no_slot": short})
        return job

    def _announce(self, pages: list[NewPage], transfer: str | None) -> None:
        if pages:
            self._client.announce(pages, transfer)

    def _plan_late(self, attached: bool) -> list[SaveJob]:
        """Saves of requests that ended in the last step, now or never: their blocks may be overwritten from here on."""
        late, self._late = self._late, []
        jobs = []
        for request, tracked, blocks, computed in late:
            job = self._plan_saves(tracked, request, blocks, computed) if attached else None
            jobs += [job] if job is not None else []
            self._handoffs.closed(request, tracked)
            self._handoffs.send_home(request, tracked)
        return jobs

    # ------------------------------------------------------------ reports and endings

    def loads_finished(self, finished: Iterable[str], invalid_blocks: set[int]) -> None:
        """All ranks reported these loads; ``invalid_blocks`` of a rank's loads hold garbage: the engine computes them.

        A rank tells its bad blocks with its own report, which may be steps before the last rank's.
        """
        for loading in self._requests.values() if invalid_blocks else ():
            if loading.load is not None:
                loading.load_bad |= invalid_blocks.intersection(loading.load.blocks)
        for request_id in finished:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.load is None:
                continue
            load, tracked.load = tracked.load, None
            self._client.release(tracked.lease)
            good = load.end - load.begin
            bad = [i for i, block in enumerate(load.blocks) if block in tracked.load_bad]
            if bad:
                tracked.no_load = True
                tracked.saves.forget_from(bad[0] * self._engine.block_tokens)
                # What could not be loaded is not there, whoever wrote it: the store hears of it only later.
                self._fresh.forget(tracked.load_names[bad[0] * self._engine.block_tokens // self._page_tokens :])
                good = max(0, bad[0] * self._engine.block_tokens - load.begin)
            self._handoffs.loaded(tracked, good)

    def finished(self, request: EngineRequest, blocks: list[int]) -> None:
        """The request ended, in whatever way. Its blocks are free after this call."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.search is not None:
            tracked.search.release()
        if tracked.load is not None:
            # The blocks hold what arrived so far: nothing of it may be saved under a name.
            self._cancels.append(request.request_id)
            self._client.release(tracked.lease)
            self._handoffs.closed(request, tracked)
            return
        computed = min(request.num_computed_tokens, len(blocks) * self._engine.block_tokens)
        if blocks:
            self._late.append((request, tracked, list(blocks), computed))
        else:
            self._handoffs.closed(request, tracked)

    def reset(self) -> Engine:
        """The weights changed: no page of before may be found again, and other workers' pages are of other weights.

        The new epoch is this engine's own, because nothing tells whether another worker got the same update.
        Returns what the engine is from now on.
        """
        fresh = msgspec.structs.replace(self._engine.fingerprint, weights_epoch=secrets.randbits(62) | 1)
        self._engine = msgspec.structs.replace(self._engine, fingerprint=fresh)
        self._late.clear()
        for request_id, tracked in self._requests.items():
            self._handoffs.broken(tracked, "the weights changed")
            if tracked.load is not None:
                self._cancels.append(request_id)
                self._client.release(tracked.lease)
            if tracked.search is not None:
                tracked.search.release()
        self._requests.clear()
        return self._engine
