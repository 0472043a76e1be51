"""What all messages are. Which messages there are is said by the modules of the links."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""
