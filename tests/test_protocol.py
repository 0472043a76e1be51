"""Bytes to messages and back: framing, limits, proofs, and what a hand-off looks like inside a request."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from kvrelay.errors import Malformed, Refused
from kvrelay.protocol.client import Acquired, Announce, Describe, Exists, Held, NewPage
from kvrelay.protocol.engine import DecodeLeg, Handoff, PrefillLeg, handoff_params, read_handoff
from kvrelay.protocol.frame import MAX_FRAME_BYTES, AnyMessage, FrameReader, decode, encode
from kvrelay.protocol.handshake import check_proof, prove
from kvrelay.protocol.message import Message
from kvrelay.types import PageName, SlotRef

NAME = PageName(b"n" * 16)
MESSAGES = [
    Describe(id=3),
    Exists(id=4, names=[NAME, PageName(b"m" * 16)]),
    Acquired(id=5, pages=[Held(SlotRef(1, 1 << 47), 32, True), None], waiting=True),
    Announce(pages=[NewPage(NAME, SlotRef(7, 9), 32), NewPage(NAME, SlotRef(8, 9), 3, parent=NAME)], transfer="t"),
]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_survive_any_cutting_of_the_stream(step: int) -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    reader, got = FrameReader(), list[Message]()
    for start in range(0, len(stream), step):
        reader.feed(stream[start : start + step])
        got += reader
    assert got == MESSAGES
    assert repr(reader) == "<FrameReader 0 bytes waiting>"


def test_payload_bytes_that_came_with_the_message_are_handed_out_first() -> None:
    reader = FrameReader()
    reader.feed(encode(Describe(id=1)) + b"abcdef" + encode(Describe(id=2)))
    assert reader.next() == Describe(id=1)
    view = bytearray(6)
    assert reader.take(memoryview(view)) == 6
    assert view == b"abcdef"
    assert reader.next() == Describe(id=2)


def test_a_bit_that_flipped_anywhere_in_a_frame_never_becomes_another_message() -> None:
    frame = encode(Describe(id=1))
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        reader = FrameReader()
        reader.feed(bytes(damaged))
        with contextlib.suppress(Malformed):
            assert reader.next() is None  # a longer frame: the rest of it does not come


def test_a_frame_without_a_checksum_is_malformed() -> None:
    for size in range(8):
        reader = FrameReader()
        reader.feed(size.to_bytes(4, "little") + b"x" * size)
        with pytest.raises(Malformed, match="damaged"):
            reader.next()


def test_a_frame_over_the_limit_is_refused_from_its_length_alone() -> None:
    reader = FrameReader()
    reader.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(Malformed, match="over the limit"):
        reader.next()


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(Malformed, match="Exists"):
        encode(Exists(id=1, names=[NAME] * 300_000))


def test_a_hundred_thousand_page_names_fit_in_one_message() -> None:
    assert len(encode(Exists(id=1, names=[NAME] * 100_000))) < MAX_FRAME_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Describe"}),
        msgspec.msgpack.encode({"type": "Describe", "id": "x"}),
        msgspec.msgpack.encode({"type": "Describe", "id": 1, "extra": 2}),
        msgspec.msgpack.encode({"type": "Exists", "id": 1, "names": "abc"}),
        encode(Describe(id=1))[4:-9],
    ],
)
def test_bytes_that_are_no_message_are_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        decode(body)


@pytest.mark.parametrize("before", [b"", b"\x82\xa1x", b"\x82\xa4type\xa8Describe\xa1x"])
def test_a_body_that_is_nested_too_deeply_is_malformed(before: bytes) -> None:
    with pytest.raises(Malformed):
        decode(before + b"\x91" * 3900 + b"\xc0")


def test_every_message_has_its_own_tag() -> None:
    kinds = AnyMessage.__args__
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds) >= 30


def test_a_proof_is_bound_to_key_side_and_nonces() -> None:
    good = prove(b"key", "client", b"a", b"b")
    check_proof(b"key", "client", b"a", b"b", good)
    others = [(b"other", "client", b"a", b"b"), (b"key", "server", b"a", b"b"), (b"key", "client", b"b", b"a")]
    for key, side, hello, challenge in others:
        with pytest.raises(Refused, match="same key file"):
            check_proof(key, side, hello, challenge, good)


@pytest.mark.parametrize("leg", [PrefillLeg(transfer="t", push_to="h:1"), DecodeLeg(transfers=["a", "b"])])
def test_a_handoff_survives_the_trip_through_request_parameters(leg: Handoff) -> None:
    params = msgspec.json.decode(msgspec.json.encode(handoff_params(leg)))
    assert read_handoff(params) == leg


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, [], "kvrelay"])
def test_parameters_without_our_key_are_no_handoff(params: object) -> None:
    assert read_handoff(params) is None


@pytest.mark.parametrize("inside", [None, {}, [], {"type": "PrefillLeg"}, {"type": "DecodeLeg", "transfers": [1]}])
def test_a_broken_handoff_is_malformed(inside: object) -> None:
    with pytest.raises(Malformed, match=r"kv_transfer_params\.kvrelay"):
        read_handoff({"kvrelay": inside})
