"""How bytes become messages, and back. No I/O happens here.

A frame is a 4-byte little-endian length and that many bytes: msgpack, and at its end 8 bytes of the msgpack's XXH3
(little-endian). Payloads have checksums of their own, but which page and layer they are is said here: a number that was
damaged on its way would bring sound bytes under the wrong name. Some messages announce raw payload bytes that follow
the frame (``Segments``); the reader takes exactly that many.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import xxhash

from kvrelay.errors import Malformed
from kvrelay.protocol.client import ClientMessage
from kvrelay.protocol.feed import FeedMessage
from kvrelay.protocol.handshake import HandshakeMessage
from kvrelay.protocol.message import Message
from kvrelay.protocol.operator import OperatorMessage
from kvrelay.protocol.peer import PeerMessage

WIRE_VERSION = 6
MAX_FRAME_BYTES = 4 << 20
"""Longest message: 100k page names are 1.8 MB."""
MAX_PAYLOAD_BYTES = 64 << 20
"""Longest raw payload after one frame."""
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 8
_HTTP = b"HTTP"
"""As a length it would be 1.3 GB, which no frame has."""

AnyMessage = HandshakeMessage | ClientMessage | PeerMessage | FeedMessage | OperatorMessage

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One whole frame. Raises ``Malformed`` when the message is longer than ``MAX_FRAME_BYTES``."""
    body = _encoder.encode(message)
    size = len(body) + _CHECKSUM_BYTES
    if size > MAX_FRAME_BYTES:
        raise Malformed(f"{type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return size.to_bytes(_LENGTH_BYTES, "little") + body + _checksum(body)


def _checksum(body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


def decode(body: bytes | bytearray | memoryview) -> Message:
    """The message of one frame's body. Raises ``Malformed``."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:  # the last: nested too deeply
        raise Malformed(f"not a message of wire version {WIRE_VERSION}: {error}") from error


def _intact(frame: bytes) -> memoryview:
    """The message's bytes. Raises ``Malformed`` when they are not those that were sent."""
    body = memoryview(frame)[:-_CHECKSUM_BYTES]
    if frame[-_CHECKSUM_BYTES:] != _checksum(body):
        raise Malformed(f"a frame was damaged on its way, or is not of wire version {WIRE_VERSION}")
    return body


class FrameReader:
    """Turns a byte stream into messages; ``take`` hands out raw payload bytes that were already received."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def __repr__(self) -> str:
        return f"<FrameReader {len(self._buffer)} bytes waiting>"

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        """The next whole message, or None until more bytes are fed. Raises ``Malformed``."""
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        if size > self.max_frame_bytes:
            if self._buffer.startswith(_HTTP):
                raise Malformed("it speaks HTTP: that is no control port (router.control_port, 7080 unless told)")
            raise Malformed(f"a frame of {size} bytes is over the limit of {self.max_frame_bytes}")
        end = _LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        message = decode(_intact(bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])))
        del self._buffer[:end]
        return message

    def take(self, view: memoryview) -> int:
        """Move up to ``len(view)`` buffered bytes into ``view``; how many."""
        count = min(len(view), len(self._buffer))
        view[:count] = self._buffer[:count]
        del self._buffer[:count]
        return count

    def __iter__(self) -> Iterator[Message]:
        while (message := self.next()) is not None:
            yield message
