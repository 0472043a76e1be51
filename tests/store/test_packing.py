"""Segments packed for the wire: what was damaged is noticed on either side, and nothing is sent that gains nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.errors import Malformed
from kvrelay.store.arena import checksums
from kvrelay.store.codec import usable
from kvrelay.store.packing import MAX_PACKED_BYTES, Packed, pack, unpack
from kvrelay.types import LOSSY, Codec, PageFormat

FORMAT = PageFormat(layers=4, kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=32)
SEGMENT = FORMAT.segment_bytes
SHARDS = 2
CODECS = [
    pytest.param(
        codec, marks=pytest.mark.skipif(not usable(codec), reason="zstandard is not installed"), id=codec.value
    )
    for codec in (Codec.LOSSLESS, Codec.INT8, Codec.FP8)
]


def kv(size: int, number: int = 0) -> bytearray:
    bits = np.random.default_rng(number).standard_normal(size // 2, np.float32).view(np.uint32) >> 16
    return bytearray(bits.astype(np.uint16).tobytes())


def batch() -> tuple[list[memoryview], list[list[int]]]:
    """Three layers of a full page in one view, and two of a partial one in two; their checksums."""
    views = [memoryview(kv(3 * SEGMENT)), *(memoryview(kv(SEGMENT // 4, n)) for n in (1, 2))]
    sums = checksums(views[0], SEGMENT // SHARDS) + [
        each for view in views[1:] for each in checksums(view, SEGMENT // 4 // SHARDS)
    ]
    return views, [sums[start : start + SHARDS] for start in range(0, len(sums), SHARDS)]


def packed(codec: Codec) -> tuple[Packed, bytes]:
    views, sums = batch()
    found = pack(codec, views, sums, FORMAT)
    assert found is not None
    assert found.size_bytes == sum(map(len, found.pieces))
    return found, b"".join(views)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_packed_is_smaller_and_comes_back(codec: Codec) -> None:
    found, raw = packed(codec)
    assert found.size_bytes < len(raw)
    back = unpack(codec, memoryview(b"".join(found.pieces)), found.checksum, len(raw), FORMAT)
    assert back is not None
    assert (back.tobytes() == raw) is (codec not in LOSSY)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
def test_each_head_of_each_layer_has_scales_of_its_own(codec: Codec) -> None:
    views, _sums = batch()
    run = FORMAT.page_tokens * FORMAT.head_dim
    numbers = np.frombuffer(views[0], np.uint16).reshape(-1, run)
    quiet = np.zeros_like(numbers)
    quiet[5] = numbers[5]
    loud = quiet.copy()
    loud[4] = 0x7F00  # near the largest bfloat16
    results = []
    for data in (quiet, loud):
        view = memoryview(bytearray(data.tobytes()))
        found = pack(codec, [view], [[each] for each in checksums(view, SEGMENT)], FORMAT)
        assert found is not None
        back = unpack(codec, memoryview(b"".join(found.pieces)), found.checksum, len(view), FORMAT)
        assert back is not None
        results.append(back.view(np.uint16).reshape(-1, run)[5].tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize("codec", CODECS)
def test_damage_on_the_way_is_noticed(codec: Codec) -> None:
    found, raw = packed(codec)
    payload = bytearray(b"".join(found.pieces))
    payload[len(payload) // 2] ^= 1
    assert unpack(codec, memoryview(payload), found.checksum, len(raw), FORMAT) is None


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
def test_bytes_that_their_writer_did_not_vouch_for_are_not_rounded(codec: Codec) -> None:
    for place in (0, 2 * SEGMENT + 7):
        views, sums = batch()
        views[0][place] ^= 1
        assert pack(codec, views, sums, FORMAT) is None
    views, sums = batch()
    views[2][3] ^= 1
    assert pack(codec, views, sums, FORMAT) is None


@pytest.mark.parametrize("codec", CODECS)
def test_what_gains_nothing_or_is_too_long_travels_as_it_is(codec: Codec) -> None:
    noise = memoryview(bytearray(np.random.default_rng(0).bytes(SEGMENT)))
    huge = memoryview(bytearray(MAX_PACKED_BYTES + SEGMENT))
    assert pack(Codec.LOSSLESS, [noise], [checksums(noise, SEGMENT)], FORMAT) is None or codec in LOSSY
    assert pack(codec, [huge], [[each] for each in checksums(huge, SEGMENT)], FORMAT) is None


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_that_is_no_gain_or_stands_for_too_much_is_refused(codec: Codec) -> None:
    found, raw = packed(codec)
    payload = memoryview(b"".join(found.pieces))
    for raw_bytes in (0, len(payload), MAX_PACKED_BYTES + 1):
        with pytest.raises(Malformed, match="are not sent as"):
            unpack(codec, payload, found.checksum, raw_bytes, FORMAT)
    with pytest.raises(Malformed):
        unpack(codec, payload, found.checksum, len(raw) + SEGMENT, FORMAT)
