"""How the pages of prompts are called, by every kind of worker that is here. It must never name a page in another way
than engines do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.identity import extend_names, name_pages
from kvrelay.types import PageName, PromptNames

Roots = dict[PageName, tuple[PageName, int]]
"""What the names of each kind of worker begin from, and tokens of its pages."""


class Naming:
    """Names the pages of one tenant's prompts for one model."""

    def __init__(self, roots: Callable[[], Roots], context_tokens: int) -> None:
        """``roots`` are asked for each time: workers come and go. Engines refuse more than ``context_tokens``."""
        self._roots = roots
        self._context_tokens = context_tokens

    def __repr__(self) -> str:
        return f"<Naming of up to {self._context_tokens} tokens>"

    def of(self, prompts: list[list[int]]) -> tuple[PromptNames, ...]:
        """Page names of each prompt; none for prompts that engines will refuse."""
        if not prompts or max(map(len, prompts)) > self._context_tokens:
            return ()
        roots = self._roots()
        return tuple(
            {kind: tuple(name_pages(root, ids, page_tokens)) for kind, (root, page_tokens) in roots.items()}
            for ids in prompts
        )

    def growing(self) -> GrowingNames:
        """Names for a text that grows, such as a prompt with its answer."""
        return GrowingNames(self._roots)


class GrowingNames:
    """Names of the full pages of a text that grows: each page is named once."""

    def __init__(self, roots: Callable[[], Roots]) -> None:
        self._roots = roots
        self._names: dict[PageName, list[PageName]] = {}

    def __repr__(self) -> str:
        return f"<GrowingNames of {max(map(len, self._names.values()), default=0)} pages>"

    def of(self, ids: Sequence[int]) -> PromptNames:
        """``ids`` begin with those of the last time."""
        roots = self._roots()
        for kind, (root, page_tokens) in roots.items():
            extend_names(self._names.setdefault(kind, []), root, ids, page_tokens)
        return {kind: tuple(self._names[kind]) for kind in roots}
