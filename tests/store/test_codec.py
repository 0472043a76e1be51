"""What is encoded comes back, rounded only where that was asked for; what nobody can have encoded is refused."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import Malformed, Refused
from kvrelay.store import codec as codec_module
from kvrelay.store.codec import Run, decode, encode, size_bytes, usable
from kvrelay.types import DTYPE_BYTES, Codec

RUN_ELEMENTS = 64
Floats = npt.NDArray[np.float32]
HEAD = struct.Struct("<B3xIII")
DTYPES = sorted(DTYPE_BYTES)
ROUNDED = (Codec.INT8, Codec.FP8)
needs_zstandard = pytest.mark.skipif(not usable(Codec.LOSSLESS), reason="zstandard is not installed")
CODECS = [pytest.param(Codec.LOSSLESS, marks=needs_zstandard), *ROUNDED]


def floats(number: int, elements: int = 8 * RUN_ELEMENTS) -> Floats:
    """Numbers as KV has them: each run of a size of its own."""
    rng = np.random.default_rng(number)
    scales = np.exp(rng.normal(size=(elements // RUN_ELEMENTS, 1)))
    values: Floats = (rng.normal(size=(elements // RUN_ELEMENTS, RUN_ELEMENTS)) * scales).astype(np.float32)
    return values.ravel()


def as_bytes(values: Floats, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def as_floats(data: bytes, dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


def run_bytes(dtype: str) -> int:
    return RUN_ELEMENTS * DTYPE_BYTES[dtype]


def encoded(codec: Codec, data: bytes, dtype: str) -> bytes:
    return b"".join(encode(codec, [Run(memoryview(data), run_bytes(dtype))], dtype))


def round_trip(codec: Codec, data: bytes, dtype: str) -> bytes:
    return decode(codec, memoryview(encoded(codec, data, dtype)), len(data), dtype).tobytes()


@needs_zstandard
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_loss_every_byte_comes_back_from_fewer(dtype: str) -> None:
    data = as_bytes(floats(1, 1 << 16), dtype)
    assert round_trip(Codec.LOSSLESS, data, dtype) == data
    assert len(encoded(Codec.LOSSLESS, data, dtype)) < 0.93 * len(data)


@needs_zstandard
@given(st.binary(min_size=4, max_size=4096).filter(lambda data: len(data) % 4 == 0), st.sampled_from(DTYPES))
def test_without_loss_any_bytes_come_back(data: bytes, dtype: str) -> None:
    pieces = b"".join(encode(Codec.LOSSLESS, [Run(memoryview(data), 4)], dtype))
    assert decode(Codec.LOSSLESS, memoryview(pieces), len(data), dtype).tobytes() == data


@needs_zstandard
def test_noise_travels_as_it_is() -> None:
    data = np.random.default_rng(0).bytes(1 << 16)
    assert len(encoded(Codec.LOSSLESS, data, "bfloat16")) == len(data) + HEAD.size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("codec", "error"), [(Codec.INT8, 0.5 / 127), (Codec.FP8, 1 / 16)])
def test_rounding_loses_no_more_than_half_a_step(codec: Codec, error: float, dtype: str) -> None:
    data = as_bytes(floats(2), dtype)
    before, after = as_floats(data, dtype), as_floats(round_trip(codec, data, dtype), dtype)
    peaks = np.abs(before.reshape(-1, RUN_ELEMENTS)).max(axis=1, keepdims=True)
    size = peaks if codec is Codec.INT8 else np.maximum(np.abs(before.reshape(-1, RUN_ELEMENTS)), peaks / 2**14)
    lost = np.abs(after - before).reshape(-1, RUN_ELEMENTS)
    slack = 2.0**-8 * np.abs(before).reshape(-1, RUN_ELEMENTS)  # what is decoded is rounded to the page's own type
    assert (lost <= error * size * 1.01 + slack).all()
    assert lost.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ROUNDED)
def test_what_was_rounded_before_is_not_rounded_again(codec: Codec, dtype: str) -> None:
    once = round_trip(codec, as_bytes(floats(3, 1 << 14), dtype), dtype)
    assert round_trip(codec, once, dtype) == once


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ROUNDED)
def test_rounding_halves_or_quarters_the_bytes(codec: Codec, dtype: str) -> None:
    data = as_bytes(floats(4), dtype)
    assert len(encoded(codec, data, dtype)) == HEAD.size + 8 * 4 + len(data) // DTYPE_BYTES[dtype]


def test_fp8_knows_every_number_of_e4m3() -> None:
    tiny, largest = 2.0**-9, 448.0
    numbers = [tiny, 7 * tiny, 2.0**-6, 1.0, 1.125, 240.0, 416.0, largest]
    values = np.resize(np.array([*numbers, *(-n for n in numbers), 0.0], np.float32), RUN_ELEMENTS)
    data = as_bytes(values, "bfloat16")
    assert as_floats(round_trip(Codec.FP8, data, "bfloat16"), "bfloat16").tolist() == values.tolist()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", ROUNDED)
def test_an_element_that_is_not_finite_keeps_its_block_from_being_rounded(codec: Codec, bad: float) -> None:
    values = floats(5)
    values[3] = bad
    data = as_bytes(values, "float32")
    assert round_trip(codec, data, "float32") == data


@pytest.mark.parametrize("codec", ROUNDED)
def test_a_run_of_zeros_and_of_numbers_too_small_for_a_scale_becomes_zeros(codec: Codec) -> None:
    values = np.concatenate([np.zeros(RUN_ELEMENTS), np.full(RUN_ELEMENTS, 1e-41)]).astype(np.float32)
    assert as_floats(round_trip(codec, as_bytes(values, "float32"), "float32"), "float32").tolist() == [0.0] * 128


@pytest.mark.parametrize("codec", CODECS)
def test_runs_of_several_lengths_go_into_one_payload(codec: Codec) -> None:
    full, part = as_bytes(floats(6), "bfloat16"), as_bytes(floats(7, 2 * RUN_ELEMENTS), "bfloat16")
    runs = [Run(memoryview(full), 128), Run(memoryview(full), 128), Run(memoryview(part), 64)]
    pieces = encode(codec, runs, "bfloat16")
    payload = b"".join(pieces)
    assert size_bytes(pieces) == len(payload)
    back = decode(codec, memoryview(payload), 2 * len(full) + len(part), "bfloat16").tobytes()
    alone = decode(codec, memoryview(b"".join(encode(codec, runs[2:], "bfloat16"))), len(part), "bfloat16").tobytes()
    assert back[: len(full)] == back[len(full) : 2 * len(full)] == round_trip(codec, full, "bfloat16")
    assert back[2 * len(full) :] == alone


# ---------------------------------------------------------------- what arrives may be anything

DATA = as_bytes(floats(8), "bfloat16")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cut", [1, 4, HEAD.size - 1, HEAD.size, HEAD.size + 1, -1])
def test_a_payload_that_is_cut_off_is_refused(codec: Codec, cut: int) -> None:
    with pytest.raises(Malformed):
        decode(codec, memoryview(encoded(codec, DATA, "bfloat16")[:cut]), len(DATA), "bfloat16")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("expected", [0, len(DATA) - 2, len(DATA) + 2, 2 * len(DATA)])
def test_a_payload_of_another_length_than_expected_is_refused(codec: Codec, expected: int) -> None:
    with pytest.raises(Malformed):
        decode(codec, memoryview(encoded(codec, DATA, "bfloat16")), expected, "bfloat16")


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_behind_the_last_block_are_refused(codec: Codec) -> None:
    with pytest.raises(Malformed):
        decode(codec, memoryview(encoded(codec, DATA, "bfloat16") + b"\0"), len(DATA), "bfloat16")


@pytest.mark.parametrize(
    "head",
    [
        (9, 128, len(DATA), 16),
        (0, 128, len(DATA), 16),
        (0, 0, 16, 16),
        (0, 3, 15, 15),
        (0, 128, 1 << 31, 16),
        (1, 128, len(DATA), 16),
        (2, 7, len(DATA), 16),
        (2, 128, len(DATA), 16),
        (3, 1 << 31, len(DATA), 16),
    ],
)
@pytest.mark.parametrize("codec", CODECS)
def test_a_head_that_does_not_add_up_is_refused(codec: Codec, head: tuple[int, int, int, int]) -> None:
    with pytest.raises(Malformed):
        decode(codec, memoryview(HEAD.pack(*head) + bytes(16)), len(DATA), "bfloat16")


@pytest.mark.parametrize("codec", CODECS)
def test_a_block_of_another_codec_than_agreed_on_is_refused(codec: Codec) -> None:
    for other in (Codec.RAW, Codec.INT8, Codec.FP8):
        if other is not codec:
            with pytest.raises(Malformed):
                decode(other, memoryview(encoded(codec, DATA, "bfloat16")), len(DATA), "bfloat16")


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_that_is_no_scale_is_refused(scale: float) -> None:
    payload = bytearray(encoded(Codec.INT8, DATA, "bfloat16"))
    payload[HEAD.size : HEAD.size + 4] = struct.pack("<f", scale)
    with pytest.raises(Malformed):
        decode(Codec.INT8, memoryview(payload), len(DATA), "bfloat16")


@pytest.mark.parametrize("codec", ROUNDED)
def test_no_scale_makes_an_element_that_is_not_finite(codec: Codec) -> None:
    payload = bytearray(encoded(codec, DATA, "bfloat16"))
    payload[HEAD.size : HEAD.size + 4] = struct.pack("<f", 3e38)
    words = np.frombuffer(decode(codec, memoryview(payload), len(DATA), "bfloat16"), np.uint16)
    assert np.isfinite((words.astype(np.uint32) << 16).view(np.float32)).all()


@needs_zstandard
def test_a_frame_that_claims_more_than_its_plane_allocates_nothing() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    body = bomb + bytes(len(DATA) // 2)
    with pytest.raises(Malformed, match="another length"):
        decode(Codec.LOSSLESS, memoryview(HEAD.pack(1, 128, len(DATA), len(body)) + body), len(DATA), "bfloat16")


@given(
    st.sampled_from([*ROUNDED, *([Codec.LOSSLESS] if usable(Codec.LOSSLESS) else [])]),
    st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damage_gives_other_bytes_of_the_same_length_or_a_refusal(codec: Codec, hits: list[tuple[int, int]]) -> None:
    payload = bytearray(encoded(codec, DATA, "bfloat16"))
    for place, value in hits:
        payload[place % len(payload)] = value
    with contextlib.suppress(Malformed):
        assert len(decode(codec, memoryview(payload), len(DATA), "bfloat16")) == len(DATA)


def test_without_zstandard_lossless_is_refused_and_the_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "zstandard", None)
    assert not usable(Codec.LOSSLESS)
    assert usable(Codec.INT8)
    with pytest.raises(Refused, match=r"store\.codec"):
        encoded(Codec.LOSSLESS, DATA, "bfloat16")
    with pytest.raises(Malformed, match="cannot unpack"):
        decode(Codec.LOSSLESS, memoryview(HEAD.pack(1, 128, len(DATA), 600) + bytes(600)), len(DATA), "bfloat16")
    assert round_trip(Codec.INT8, DATA, "bfloat16")
