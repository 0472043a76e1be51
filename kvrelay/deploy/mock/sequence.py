"""One prompt and its answer inside a mock engine. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.protocol.engine import Handoff
from kvrelay.types import PageName


class Ending(StrEnum):
    """Why an answer ended, in vLLM's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True, eq=False)
class Sequence:
    """Its tokens, and what the engine has of them."""

    id: str
    tokens: list[int]
    """The prompt, and after it the answer."""
    prompt_tokens: int
    root: PageName
    """What its first page is chained to."""
    names: list[PageName]
    """Its full pages, as far as they are named."""
    tail: PageName | None
    """The prompt's partial last page, if it has one."""
    max_tokens: int
    min_tokens: int
    ignore_end: bool
    state: int
    """Digest of its tokens."""
    choice: int = 0
    leg: Handoff | None = None
    computed: int = 0
    """Leading tokens whose KV is in the engine's cache."""
    held: int = 0
    """Blocks that it holds; the first ``named`` of them have a name."""
    named: int = 0
    local_tokens: int = 0
    """Found in the engine's own cache."""
    loaded_tokens: int = 0
    """Loaded from the node's store."""
    ending: Ending | None = None
    waited: bool = False
    """It has waited for a transfer."""
    begun: bool = False
    """A step has begun with it."""
    saved: int = 0
    """Leading pages that were put into the node's store."""
    asked_s: float = field(default=-1.0)
    """When it first asked for its pages; negative before."""

    def __repr__(self) -> str:
        return f"<Sequence {self.id}, {self.computed} of {len(self.tokens)} tokens computed>"

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one is written."""
        return len(self.tokens) - self.computed

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed here."""
        return self.local_tokens + self.loaded_tokens
