"""What each count of a store or a worker says, for ``docs/reference/metrics.md``. A test holds it to the code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "bytes_capacity": "Most memory for pages (`store.arena_bytes`).",
        "bytes_pushed": "Sent to other stores and taken by them, as the pages lie in the store.",
        "bytes_received": "Received from other stores, as they travelled: packed ones count packed.",
        "bytes_resident": "Memory that slots occupy, free ones included.",
        "bytes_used": "Memory of the slots that are not free.",
        "checksum_failures": "Segments from other stores that did not match their checksum.",
        "codec_bytes_saved": "Bytes that packing kept off the wire, of what was received.",
        "events_dropped": "Events that a router was not sent.",
        "handoffs_incomplete": "Hand-offs that were over and left pages of their prompt out: failed, stale, evicted.",
        "handoffs_malformed": "Transfer fields of a request that are not a router's of this version.",
        "handoffs_unheard": "Hand-offs that the store heard nothing of, or nothing more, for `worker.load_wait_s`.",
        "leases_open": "Leases that pin pages now.",
        "links_crashed": "Links that an error of the store ended.",
        "links_refused": "Callers that failed the handshake, or said what is no message.",
        "load_bad_checksum": "Loads cut short: bytes did not match their checksum.",
        "load_cancelled": "Loads cut short: the client went away.",
        "load_crashed": "Loads cut short: a fault in the loader.",
        "load_page_lost": "Loads cut short: a page's writer failed before it was whole.",
        "load_slot_reused": "Loads cut short: a page was evicted between check and copy.",
        "load_stalled": "Loads cut short: nothing arrived for `worker.load_wait_s`.",
        "load_wrong_epoch": "Loads cut short: the store was restarted meanwhile.",
        "owner_links": "Links of workers and scripts that are open now.",
        "owners": "Workers and scripts that are attached now.",
        "owners_lost": "Workers and scripts whose last link ended.",
        "pages_capacity": "Slots of all arenas, with memory or not.",
        "pages_damaged": "Whole pages that turned out damaged and were forgotten.",
        "pages_evicted": "Pages that made room for others.",
        "pages_failed": "Pages given up before they were whole.",
        "pages_filling": "Pages that are being written now.",
        "pages_not_saved_no_slot": "Pages not saved: the worker had no empty slot.",
        "pages_pinned": "Pages that may not be evicted now.",
        "pages_put": "Pages that became whole here.",
        "pages_received": "Pages that came whole from other stores.",
        "pages_used": "Pages here now.",
        "pushes_failed": "Pushes to other stores that did not end whole.",
        "pushes_open": "Pushes under way now.",
        "push_orders": "Pushes that routers ordered.",
        "push_orders_refused": "Of these, those that could not begin.",
        "read_bad_checksum": "Pages that a script read and that did not match their checksum.",
        "restore_us": "Microseconds in which loads of at least 1 MiB copied, verified and wrote; waits not counted.",
        "restored_bytes": "Bytes of these.",
        "saves_behind": "Times that copies from the GPU fell behind the forward pass.",
        "saves_crashed": "Faults while pages were copied out of the engine's blocks.",
        "saves_unfilled": "Pages whose slot was left unfilled, as the store was away or came back.",
        "saves_wrong_epoch": "Steps whose pages were given up, as the store was restarted meanwhile.",
        "slots_failed": "Slots of failed pages that are out of use now.",
        "slots_granted": "Empty slots that workers hold in stock now.",
        "slots_occupied": "Slots that are not free now.",
        "stale_refs": "References to a slot that has moved on.",
        "transfers_arrived": "Hand-offs of which every page came.",
        "transfers_failed": "Hand-offs that ended short.",
        "transfers_open": "Hand-offs under way now.",
    }
)
"""Sentence by name."""
