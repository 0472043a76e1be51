"""One mock worker's dealings with its node's store: what vLLM would ask the connector. It must never wait."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.deploy.mock.page_store import MockStore
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.deploy.mock.wire import Later
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg
from kvrelay.types import PageFormat, PageName, Stage, Value


class LoadLaw(Value, frozen=True, kw_only=True):
    """How fast pages get from the store's memory into the engine's cache, by the real clock."""

    bytes_per_s: float
    wait_s: float
    """A transfer that is silent for so long is waited for no more."""
    hidden_after_tokens: int
    """Tokens of P's last chunk: all others that a request waited for were loaded meanwhile."""


class Handoffs:
    """Implements ``scheduler.PageSource`` with the stores of this process, ``stores`` by their addresses."""

    def __init__(
        self,
        store: MockStore,
        stores: dict[str, MockStore],
        form: PageFormat,
        law: LoadLaw,
        *,
        owner: str,
        later: Later,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called when asking again makes sense."""
        self._store = store
        self._stores = stores
        self._page_tokens = form.page_tokens
        self._token_bytes = form.layers * form.token_layer_bytes
        self._law = law
        self._owner = owner
        self._later = later
        self._wake = wake

    def __repr__(self) -> str:
        return f"<Handoffs of {self._owner} at {self._store.info.name}>"

    def arrived(self, sequence: Sequence, now: float) -> None:
        """A request is here: open its transfer, before anybody could ask for it."""
        leg = sequence.leg
        if isinstance(leg, PrefillLeg) and not self._store.is_away:
            target = self._target(leg)
            if target is not None:
                names = self._prompt_pages(sequence)
                target.open(leg.transfer, self._owner, names, sequence.prompt_tokens, self._store, now)
            else:
                self._store.relay(leg.transfer, Stage.FAILED, reason=f"no store at {leg.push_to} is simulated here")

    def find(self, sequence: Sequence, local_tokens: int, now: float) -> int | None:
        if sequence.asked_s < 0:
            sequence.asked_s = now
            self._later(now + self._law.wait_s, self._wake)
        if sequence.waited and self._is_expected(sequence, now):
            return None
        names = self._prompt_pages(sequence)
        depth = self._store.depth(names)
        if depth < len(names) and self._is_expected(sequence, now):
            sequence.waited = True
            return None
        there = min(depth * self._page_tokens, sequence.prompt_tokens)
        return max(0, there - local_tokens)

    def _is_expected(self, sequence: Sequence, now: float) -> bool:
        leg = sequence.leg
        if not isinstance(leg, DecodeLeg) or now - sequence.asked_s > self._law.wait_s:
            return False
        return self._store.may_bring(leg.transfers, self._wake)

    def load_s(self, sequence: Sequence) -> float:
        tokens = sequence.loaded_tokens
        if sequence.waited:
            tokens = min(tokens, self._law.hidden_after_tokens)
        return tokens * self._token_bytes / self._law.bytes_per_s

    def loaded(self, sequence: Sequence) -> None:
        size_bytes = sequence.loaded_tokens * self._token_bytes
        self._store.restored(size_bytes, size_bytes / self._law.bytes_per_s)
        for transfer in sequence.leg.transfers if isinstance(sequence.leg, DecodeLeg) else ():
            self._store.relay(transfer, Stage.LOADED, tokens=sequence.loaded_tokens)

    def begins(self, sequence: Sequence, until: int) -> None:
        leg, begun = sequence.leg, sequence.begun
        sequence.begun = True
        if not isinstance(leg, PrefillLeg) or sequence.written:
            return
        if not begun:
            self._store.relay(leg.transfer, Stage.STARTED, tokens=sequence.prompt_tokens)
        if until >= sequence.prompt_tokens:
            self._store.relay(leg.transfer, Stage.LAST_CHUNK, tokens=sequence.prompt_tokens)

    def computed(self, sequence: Sequence, begun_s: float, now: float) -> None:
        """Pages that a step has filled are in the store when it ends, those from the engine's own cache with them."""
        full = sequence.computed // self._page_tokens
        names = sequence.names[sequence.saved : full]
        sequence.saved = full
        if sequence.computed == sequence.prompt_tokens and sequence.tail is not None:
            names = [*names, sequence.tail]
        if not names or self._store.is_away:
            return
        saved = self._store.put(names)
        if not isinstance(sequence.leg, PrefillLeg) or (target := self._target(sequence.leg)) is None:
            return
        if saved:
            target.saved(sequence.leg.transfer, names, begun_s=begun_s, now=now)
        else:
            target.fail(sequence.leg.transfer, f"store {self._store.info.name} is full of pages in use")

    def ended(self, sequence: Sequence, now: float) -> None:
        leg = sequence.leg
        if isinstance(leg, PrefillLeg) and not sequence.written and (target := self._target(leg)) is not None:
            target.fail(leg.transfer, "the prefill ended before all its pages were saved")
        if isinstance(leg, DecodeLeg) and leg.home in self._stores and not self._store.is_away:
            self._send_home(sequence, self._stores[leg.home], now)

    def _send_home(self, sequence: Sequence, home: MockStore, now: float) -> None:
        """What was generated goes to the node of the next turn's prefill."""
        names = sequence.names[sequence.prompt_tokens // self._page_tokens : sequence.computed // self._page_tokens]
        if names and sequence.written:
            transfer = f"{sequence.id}/home"
            home.open(transfer, self._owner, names, len(names) * self._page_tokens, self._store, now)

    def _target(self, leg: PrefillLeg) -> MockStore | None:
        """The store to which a hand-off goes; None: it is not of this process, and nothing can be sent there."""
        return self._store if leg.push_to is None else self._stores.get(leg.push_to)

    def _prompt_pages(self, sequence: Sequence) -> list[PageName]:
        """All pages of the prompt, the partial one included."""
        full = sequence.names[: sequence.prompt_tokens // self._page_tokens]
        return full if sequence.tail is None else [*full, sequence.tail]
