"""Sequences, laws and page sources that are as good as any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvrelay import identity
from kvrelay.deploy.mock.author import Author, state_of
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.policy.fit import start
from kvrelay.policy.perf import Perf
from kvrelay.types import PageName

PAGE = 4
"""Tokens of a page, and of a block."""
ROOT = PageName(b"r" * 16)
END = 0
AUTHOR = Author(range(10, 60), END, mean_tokens=50)
PERF = Perf(prefill=start(1.0, 0.1, 0.001), step=start(0.5, 0.25, 0.01), answer=start(0.01))


def sequence(prompt: int | list[int] = 8, *, max_tokens: int = 3, **more: Any) -> Sequence:
    """A prompt of so many tokens, 1, 2, 3 ..., or of these."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    names: list[PageName] = []
    identity.extend_names(names, ROOT, tokens, PAGE)
    rest = tokens[len(names) * PAGE :]
    tail = identity.page_name(names[-1] if names else ROOT, identity.token_bytes(rest)) if rest else None
    given: dict[str, Any] = {"min_tokens": 0, "ignore_end": True, **more}
    return Sequence(
        id="s",
        tokens=tokens,
        prompt_tokens=len(tokens),
        root=ROOT,
        names=names,
        tail=tail,
        max_tokens=max_tokens,
        state=state_of(tokens),
        **given,
    )


@dataclass
class FakePages:
    """A page source that says what it is told to, and notes what it hears."""

    found: dict[Sequence, int | None] = field(default_factory=dict)
    """Tokens of a prompt that can be loaded, the engine's own included; 0 for those not in here."""
    load_takes_s: float = 1.0
    heard: list[tuple[str, Sequence, int]] = field(default_factory=list)

    def find(self, sequence: Sequence, local_tokens: int, now: float) -> int | None:
        found = self.found.get(sequence, 0)
        return None if found is None else max(0, found - local_tokens)

    def load_s(self, sequence: Sequence) -> float:
        return self.load_takes_s

    def loaded(self, sequence: Sequence) -> None:
        self.heard.append(("loaded", sequence, sequence.loaded_tokens))

    def begins(self, sequence: Sequence, until: int) -> None:
        self.heard.append(("begins", sequence, until))

    def computed(self, sequence: Sequence, begun_s: float, now: float) -> None:
        self.heard.append(("computed", sequence, sequence.computed))

    def ended(self, sequence: Sequence, now: float) -> None:
        self.heard.append(("ended", sequence, sequence.written))
