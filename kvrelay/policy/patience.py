"""How long to wait for whom. Numbers and their reasons only; whoever waits reads a clock, this never does."""

from __future__ import annotations

SILENT_LEASES = 3.0
"""Leases without a sign of health after which a worker's running requests are given up.

One missed lease takes new work away and moves prefills, which are cheap to do elsewhere. A stream that breaks is not:
three leases outlast a link that is dialled again and an engine that is busy for a moment, and yet are a time that a
client will wait.
"""
RENDER_S = 5.0
"""Longest wait for a worker to render a prompt: ten times what the longest takes. Without an answer the request is not
split, which costs less than to wait on."""
RENDER_TRIES = 2
"""Workers asked to render one prompt: the second is for the case that the first has just died."""
