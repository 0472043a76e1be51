"""What a request was promised: its own headers over its tenant's settings over the router's. It must never give it more
right than its tenant has."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from kvrelay.config import Config, RouterConfig, TenantConfig
from kvrelay.errors import BadRequest, Misconfigured
from kvrelay.policy.admit import Limits, Slo

TTFT_HEADER = "x-kvrelay-ttft-s"
TPOT_HEADER = "x-kvrelay-tpot-s"
PRIORITY_HEADER = "x-kvrelay-priority"


class Promises:
    """Reads them for every request. Raises ``Misconfigured`` for tenants that have no key."""

    def __init__(self, config: Config, tenants: frozenset[str]) -> None:
        self._router = config.router
        self._tenants = config.tenants
        for name in config.tenants.keys() - tenants:
            raise Misconfigured(f"tenants.{name}: it has no key in router.api_keys; add {name}:KEY there")

    def __repr__(self) -> str:
        return f"<Promises to {len(self._tenants)} tenants>"

    def of(self, tenant: str, headers: Mapping[str, str]) -> Slo:
        """What a request with ``headers`` was promised. Raises ``BadRequest``."""
        settings = self._tenants.get(tenant, TenantConfig())
        asked = _number(headers, PRIORITY_HEADER)
        return Slo(
            ttft_s=_first(_seconds(headers, TTFT_HEADER), settings.slo_ttft_s, self._router.slo_ttft_s),
            tpot_s=_first(_seconds(headers, TPOT_HEADER), settings.slo_tpot_s, self._router.slo_tpot_s),
            priority=settings.priority if asked is None else min(settings.priority, math.floor(asked)),
            share=settings.share,
        )


def limits(router: RouterConfig, tenants: Collection[str]) -> Limits:
    """How many requests there may be, and how long they may wait where; ``tenants`` have keys.

    Routers that share a port divide D's KV: none can know what another has just promised, since heartbeats tell what is
    in use, and later.
    """
    return Limits(
        queue_s=router.queue_s,
        hold_s=router.hold_s,
        kv_share=1.0 / router.replicas,
        shared=len(tenants) > 1,
    )


def _first(*seconds: float | None) -> float | None:
    """The first that is given; 0 means none."""
    given = next((value for value in seconds if value is not None), 0.0)
    return given or None


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    value = _number(headers, name)
    if value is not None and value < 0:
        raise BadRequest(f"the header {name} must not be negative", param=name)
    return value


def _number(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 86_400:
        raise BadRequest(f"the header {name} must be a number up to 86400", param=name)
    return value
