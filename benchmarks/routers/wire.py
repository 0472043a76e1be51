"""HTTP/1.1 as bytes, as cheap as Python does it: mocks and clients must not be what is measured. It reads only what
routers and the servers here really send."""

from __future__ import annotations

import re
from collections.abc import Iterator

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_LAST = b"\r\n" + LAST_CHUNK
"""A head may end in ``LAST_CHUNK`` alone."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Inbox:
    """Bytes of one connection, given out as whole requests."""

    def __init__(self) -> None:
        self._rest = b""

    def __repr__(self) -> str:
        return f"<Inbox {len(self._rest)} bytes of an unfinished request>"

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Path and body of each request that is whole now. Bodies have a length: nobody here sends chunks."""
        self._rest += data
        while (head_end := self._rest.find(HEAD_END)) >= 0:
            length = _LENGTH.search(self._rest, 0, head_end)
            end = head_end + len(HEAD_END) + (int(length[1]) if length else 0)
            if len(self._rest) < end:
                return
            path = self._rest[: self._rest.index(b"\r\n")].split(b" ")[1]
            body, self._rest = self._rest[head_end + len(HEAD_END) : end], self._rest[end:]
            yield path, body


class Outcome:
    """One answer as it comes in."""

    def __init__(self) -> None:
        self._data = b""
        self._end = -1
        """Length of the whole answer; 0: it comes in chunks."""
        self.status = 0
        self.events = 0

    def __repr__(self) -> str:
        return f"<Outcome {self.status}, {len(self._data)} bytes>"

    def feed(self, data: bytes) -> bool:
        """Whether the answer is whole now."""
        self._data += data
        self.events += data.count(b"data: ")
        if self._end < 0 and (head_end := self._data.find(HEAD_END)) >= 0:
            self.status = int(self._data[9:12])
            length = _LENGTH.search(self._data, 0, head_end)
            self._end = head_end + len(HEAD_END) + int(length[1]) if length else 0
        if self._end == 0:
            self._data = self._data[-len(_LAST) :]
            return self._data == _LAST
        return 0 < self._end <= len(self._data)


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole answer of JSON."""
    length = str(len(body)).encode()
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %b\r\n\r\n%b" % (status, length, body)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(event: bytes) -> bytes:
    """An event as uvicorn sends it, in a chunk of its own."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def request(host: str, path: str, body: bytes) -> bytes:
    """A request that keeps its connection."""
    lines = f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", f"content-length: {len(body)}"
    return "\r\n".join((*lines, "", "")).encode() + body
