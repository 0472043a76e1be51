"""What the scheduler half tells the worker half to do in one engine step. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.types import PageFormat


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One page between an arena slot and the engine's blocks."""

    slot: int
    generation: int
    start: int
    """Position of the page's first token in the request."""
    tokens: int
    shards: int = 1
    """How many writers share its heads."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Pages of one request to copy out of its blocks into granted slots."""

    request_id: str
    blocks: list[int]
    """The request's block table."""
    pages: list[PageCopy]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Pages of one request to copy into its blocks, as they become ready."""

    request_id: str
    blocks: list[int]
    pages: list[PageCopy]
    begin: int
    """First position to write; positions below are in the blocks already."""
    end: int
    """One past the last position to write."""
    format: PageFormat | None = None
    """Of the pages, where it is not the engine's own: they are converted."""


@dataclass
class StepPlan:
    """One step's work. ``epoch`` is that of the arena whose slots are meant."""

    epoch: int = 0
    saves: list[SaveJob] = field(default_factory=list)
    """Complete after this step's forward: copied layer by layer while it runs."""
    late_saves: list[SaveJob] = field(default_factory=list)
    """Complete since an earlier step, of requests that have ended: copied before this step writes anything."""
    loads: list[LoadJob] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Requests whose load is wanted no more."""

    def __repr__(self) -> str:
        pages = sum(len(job.pages) for job in self.saves + self.late_saves)
        return f"<StepPlan saves {pages} pages, starts {len(self.loads)} loads, cancels {len(self.cancels)}>"
