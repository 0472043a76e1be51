"""Pins that end by themselves, at the latest with the link that took them. No link can release another's."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import Overloaded
from kvrelay.store.catalog import Catalog
from kvrelay.store.page import Page, Writer

MAX_LEASES = 65536
MAX_TTL_S = 3600.0


@dataclass(slots=True)
class Lease:
    """Pages that one link holds under one name."""

    expires: float
    pages: dict[Page, None] = field(default_factory=dict)


class Leases:
    """All leases of a store by holder and name."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._leases: dict[tuple[Writer, str], Lease] = {}

    def __repr__(self) -> str:
        return f"<Leases {len(self._leases)} open>"

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, holder: Writer, name: str, pages: list[Page], ttl_s: float, now: float) -> None:
        """Pin ``pages`` under the lease, new or not, and let it last ``ttl_s`` from now. Raises ``Overloaded``."""
        lease = self._leases.get((holder, name))
        if lease is None:
            if len(self._leases) >= MAX_LEASES:
                raise Overloaded("the store has too many open leases; release some")
            lease = self._leases[holder, name] = Lease(now)
        lease.expires = now + min(ttl_s, MAX_TTL_S)
        fresh = dict.fromkeys(page for page in pages if page not in lease.pages)
        lease.pages.update(fresh)
        self._catalog.pins.hold(fresh, now)

    def release(self, holder: Writer, name: str) -> None:
        """Unpin what the lease holds; an unknown one was released or ran out before."""
        lease = self._leases.pop((holder, name), None)
        self._catalog.pins.release(lease.pages if lease else ())

    def release_all(self, holder: Writer) -> None:
        """``holder`` is gone."""
        for key in [key for key in self._leases if key[0] is holder]:
            self.release(*key)

    def expire(self, now: float) -> None:
        """Release the leases whose time is up."""
        for key in [key for key, lease in self._leases.items() if lease.expires <= now]:
            self.release(*key)
