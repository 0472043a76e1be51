"""What was learned from finished requests: how fast workers and links are, and how long answers get. It must never keep
anything of a request itself."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvrelay.fleet.fading import Fading, usual_s
from kvrelay.fleet.likeness import Likeness
from kvrelay.fleet.links import Links
from kvrelay.fleet.rates import Law, RateBook
from kvrelay.policy.cost import Item
from kvrelay.policy.fit import Fit
from kvrelay.policy.hardware import hardware_of, shape_of
from kvrelay.policy.laws import Laws
from kvrelay.policy.moves import Move
from kvrelay.policy.perf import Perf, Rates, seed
from kvrelay.types import Engine, Value, WorkerInfo

OUTPUT_TOKENS = 128.0
"""Expected tokens of an answer before any was seen; max_tokens is what clients allow, not what models write."""
OUTPUT_WEIGHT = 0.02
ENOUGH_HANDOFFS = 8
"""Hand-offs to be seen before D may compute a prompt itself to save one: until then the operator's roles decide."""
OWN_AFTER = 8
"""Observations of a worker before its own law may differ from its kind's. With fewer, the worker that was tried first
would look faster than others whose seed is too slow, and those would never be tried."""
MOST_UNREAD = 256
"""Most observations that are kept to be learned later."""
KIND_FIRST, KIND_EVERY = 64, 4
"""A kind learns from the first 64 observations of its workers in all, and then from one in four, or from one in as many
as it has workers if that is fewer: with more workers there are more observations, and each update of the kind costs
more."""
MAX_KINDS = 256
MAX_MODELS = 256
"""Models whose answers' lengths are remembered."""
MAX_OUTPUT_TOKENS = 1e9


class Learned(Value, frozen=True, kw_only=True):
    """What a router stores for the next one: laws by kind of worker, transfer speeds by way."""

    kinds: dict[str, Perf] = msgspec.field(default_factory=dict)
    ways: dict[str, Move] = msgspec.field(default_factory=dict)
    output_tokens: dict[str, float] = msgspec.field(default_factory=dict)
    """Mean length of an answer, by model."""
    handoffs: int = 0

    def impossible(self) -> str:
        """A sentence about the first value that cannot have been learned; empty when all can."""
        sound = {name: perf.can_be_learned() for name, perf in self.kinds.items()}
        sound |= {way: move.can_be_learned() for way, move in self.ways.items()}
        for name in (name for name, is_sound in sound.items() if not is_sound):
            return f"no law of {name!r} can be so"
        for model, tokens in self.output_tokens.items():
            if not 0.0 <= tokens <= MAX_OUTPUT_TOKENS:
                return f"no answer of {model!r} has {tokens:g} tokens"
        return "" if self.handoffs >= 0 else f"there cannot be {self.handoffs} hand-offs"


def kind_of(engine: Engine) -> str:
    """Key of the worker's kind. Workers of one kind are predicted to be equally fast until measurements differ."""
    return hashlib.blake2b(msgspec.json.encode((engine.fingerprint, engine.device)), digest_size=8).hexdigest()


def _is_told(seen: int, workers: int) -> bool:
    """Whether observation number ``seen`` of one worker updates its kind as well, which has so many ``workers``."""
    return seen <= max(OWN_AFTER, KIND_FIRST // workers) or seen % max(KIND_EVERY, workers) == 0


class Experience:
    """The laws of each worker: its kind's, times the factor by which the worker was measured to be slower
    (``Likeness``)."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._kinds: dict[str, Perf] = {}
        self._workers: dict[str, tuple[str, Perf]] = {}
        """Kind and own laws of each worker, by name."""
        self._rates = {law: RateBook() for law in Law}
        self._likeness = Likeness()
        self._fading = Fading()
        self._output_tokens: dict[str, float] = {}
        self._unread: deque[tuple[str, Callable[[Perf], Perf]]] = deque()
        """Observations that are not learned yet: the worker, and the update of its laws."""
        self.handoffs = 0
        """Requests with a hand-off between two workers whose first token was seen."""

    def __repr__(self) -> str:
        return f"<Experience of {len(self._kinds)} kinds, {len(self._workers)} workers, {self.handoffs} hand-offs>"

    @property
    def knows_handoffs(self) -> bool:
        return self.handoffs >= ENOUGH_HANDOFFS

    def join(self, worker: WorkerInfo) -> None:
        """A worker registers; it keeps what was learned of it unless it became another kind."""
        self.study()
        kind = kind_of(worker.engine)
        known = self._workers.get(worker.name)
        if kind not in self._kinds:
            self._make_room()
            self._kinds[kind] = seed(shape_of(worker.engine.fingerprint.format), hardware_of(worker.engine.device))
        if known is None or known[0] != kind:
            self._forget(worker.name)
            self._workers[worker.name] = (kind, self._kinds[kind].heir())
            for law in Law:
                self._write(law, worker.name)

    def _make_room(self) -> None:
        """Forget a kind that no worker is of, when there are too many."""
        used = {kind for kind, _ in self._workers.values()}
        unused = [kind for kind in self._kinds if kind not in used]
        if len(self._kinds) >= MAX_KINDS and unused:
            del self._kinds[unused[0]]

    def perf(self, worker: str) -> Perf:
        """The laws that predict ``worker``. Raises KeyError for a worker that never joined."""
        return Perf(prefill=self.prefill(worker), step=self.step(worker), answer=self.answer(worker))

    def prefill(self, worker: str) -> Fit:
        """The law of its prefills."""
        return self._law(Law.PREFILL, worker)

    def step(self, worker: str) -> Fit:
        """The law of its decode steps."""
        return self._law(Law.STEP, worker)

    def answer(self, worker: str) -> Fit:
        """The law of its first tokens."""
        return self._law(Law.ANSWER, worker)

    def errors(self) -> Iterator[tuple[str, Law, float]]:
        """``Fit.error`` of each law of each worker: of the worker's own law where it was observed often enough, else of
        its kind's."""
        self.study()
        of_kind = {(kind, law): law.of(perf).error() for kind, perf in self._kinds.items() for law in Law}
        for worker, (kind, perf) in self._workers.items():
            for law in Law:
                own = self._fading.like(worker, law) or law.of(perf)
                yield worker, law, own.error() if own.seen >= OWN_AFTER else of_kind[kind, law]

    def guesses(self, prefill: str, decode: str) -> tuple[str, ...]:
        """Items of a cost for which nothing was measured yet on workers like ``prefill``, which computes the prompt, or
        like ``decode``."""
        laws = ((Item.PREFILL, self.prefill(prefill)), (Item.ANSWER, self.answer(decode)), ("tpot", self.step(decode)))
        return tuple(name for name, law in laws if not law.seen)

    def _law(self, law: Law, worker: str) -> Fit:
        self.study()
        return self._fading.like(worker, law) or self._learned(law, worker)

    def _learned(self, law: Law, worker: str) -> Fit:
        """The learned law of ``worker``, whether or not it has faded: its kind's, times the worker's own slowness."""
        kind, perf = self._workers[worker]
        own, of_kind = law.of(perf), law.of(self._kinds[kind])
        return own.like(of_kind, self._likeness.factor(worker, law, of_kind)) if own.seen >= OWN_AFTER else of_kind

    def _own(self, law: Law, worker: str) -> Rates | None:
        """Rates of ``worker`` where they differ from its kind's; None while they do not."""
        like = self._fading.like(worker, law)
        if like is not None:
            return like.rates
        learned, kind = self._learned(law, worker).rates, self._workers[worker][0]
        return learned if learned != law.of(self._kinds[kind]).rates else None

    def fade(self, now: float) -> None:
        """Time passed. A worker whose law says that it is slow, and that no request has tested for long, is predicted
        like the best of its kind until one does."""
        if not self._fading.is_time(now):
            return
        self.study()
        for law in Law:
            best = self._best(law)
            for worker, (kind, perf) in self._workers.items():
                is_known = law.of(perf).seen >= OWN_AFTER
                if is_known and self._fading.look(worker, law, self._learned(law, worker), best[kind], now):
                    self._write(law, worker)

    def sent(self, worker: str, laws: Iterable[Law]) -> None:
        """``worker`` gets a request that will test ``laws``: those that had faded are the learned ones again from now
        on."""
        for law in laws:
            if self._fading.try_out(worker, law):
                self._write(law, worker)

    def _best(self, law: Law) -> dict[str, Fit]:
        """The law of the fastest worker of each kind."""
        best: dict[str, Fit] = {}
        for worker, (kind, perf) in self._workers.items():
            fit = self._learned(law, worker)
            is_known = law.of(perf).seen >= OWN_AFTER
            if is_known and (kind not in best or usual_s(fit, law) < usual_s(best[kind], law)):
                best[kind] = fit
        return best

    def saw(self, worker: str, learn: Callable[[Perf], Perf]) -> None:
        """Queue an observation of ``worker``. ``learn`` is applied to its laws, and often to its kind's, before the
        next prediction."""
        self._unread.append((worker, learn))
        if len(self._unread) >= MOST_UNREAD:
            self.study()

    def study(self) -> None:
        """Learn all queued observations. This takes longer than to queue them, so it is called when no request waits.

        Every prediction calls it first, so a choice never depends on when it was called.
        """
        while self._unread:  # one by one: what one raises does not lose the rest
            self._learn(*self._unread.popleft())

    def _learn(self, worker: str, learn: Callable[[Perf], Perf]) -> None:
        if worker not in self._workers:
            return
        kind, before = self._workers[worker]
        own = learn(before)
        first = [law for law in Law if law.of(own).seen == 1 and not law.of(before).seen]
        if first:
            # Begin with what the kind has learned since the worker joined: prompts of one length alone cannot tell a
            # constant from a rate.
            known = {law.value: law.of(self._kinds[kind]).heir() for law in first}
            own = learn(msgspec.structs.replace(before, **known))
        news = [law for law in Law if law.of(own) is not law.of(before)]
        for law in news:
            like = self._fading.tested(worker, law)
            if like is not None:
                own = self._tried(worker, law, own, learn(msgspec.structs.replace(own, **{law.value: like})))
        self._workers[worker] = (kind, own)
        for law in news:
            self._likeness.learned(worker, law, law.of(own))
        workers = sum(its == kind for its, _ in self._workers.values())
        is_told = any(_is_told(law.of(own).seen, workers) for law in news)
        if is_told:
            self._kinds[kind] = learn(self._kinds[kind])
        for law in news:
            self._write(law, worker)
            if is_told:
                self._rewrite(law, kind)

    def _tried(self, worker: str, law: Law, own: Perf, as_best: Perf) -> Perf:
        """The laws of ``worker`` after a trial: ``own`` if it was as slow as learned, else those of the best of its
        kind. The one whose prediction was closer to the observation is right."""
        slow = abs(law.of(own).errors[-1]) <= abs(law.of(as_best).errors[-1])
        self._fading.tried(worker, law, slow=slow)
        return own if slow else msgspec.structs.replace(own, **{law.value: law.of(as_best)})

    def _write(self, law: Law, worker: str) -> None:
        kind, own = self._workers[worker][0], self._own(law, worker)
        of_kind = law.of(self._kinds[kind]).rates
        self._rates[law].write(worker, kind, of_kind=of_kind, own=own)

    def _rewrite(self, law: Law, kind: str) -> None:
        """The law of ``kind`` has changed, and with it the laws of workers that are a factor slower."""
        book, of_kind = self._rates[law], law.of(self._kinds[kind]).rates
        for worker, (its, _) in self._workers.items():
            own = self._own(law, worker) if its == kind else None
            if own is not None or (its == kind and book.has_own(worker)):
                book.write(worker, kind, of_kind=of_kind, own=own)

    def rates(self, law: Law, workers: tuple[str, ...]) -> Laws:
        """Rates of each of ``workers``. Raises KeyError for a worker that never joined."""
        self.study()
        return self._rates[law].of(workers)

    def output_tokens(self, model: str, at_most: float) -> float:
        """Expected length of an answer of ``model`` in tokens, and no more than ``at_most``."""
        return min(at_most, self._output_tokens.get(model, OUTPUT_TOKENS))

    def saw_output(self, model: str, tokens: float) -> None:
        """An answer of ``model`` ended after ``tokens`` tokens."""
        mean = self._output_tokens.get(model, tokens)
        while model not in self._output_tokens and len(self._output_tokens) >= MAX_MODELS:
            del self._output_tokens[next(iter(self._output_tokens))]
        self._output_tokens[model] = mean + OUTPUT_WEIGHT * (tokens - mean)

    def keep_only(self, workers: Iterable[str]) -> None:
        """Forget all other workers; what their kind learned is kept."""
        self.study()
        for worker in self._workers.keys() - set(workers):
            self._forget(worker)
        self._fading.keep_only(self._workers)

    def _forget(self, worker: str) -> None:
        self._fading.forget(worker)
        self._likeness.forget(worker)
        if worker in self._workers:
            del self._workers[worker]
            for book in self._rates.values():
                book.forget(worker)

    def learned(self) -> Learned:
        """What to store for the next router."""
        self.study()
        return Learned(
            kinds=dict(self._kinds),
            ways=self._links.known(),
            output_tokens=dict(self._output_tokens),
            handoffs=self.handoffs,
        )

    def recall(self, learned: Learned) -> None:
        """Take over what a former router learned. To be called before workers join."""
        self._kinds |= learned.kinds
        self._links.recall(learned.ways)
        self._output_tokens |= learned.output_tokens
        self.handoffs = learned.handoffs
