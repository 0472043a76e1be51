"""What all legs of one request know of it. It must never change: what is left to write of it is no part of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One request, once its worker's kind is known and its prompts are read."""

    request_id: str
    tenant: str
    received_s: float
    model: str
    salt: str
    """The tenant's, of page names."""
    prompts: list[list[int]]
    """Token ids; none of a request that stays whole."""
