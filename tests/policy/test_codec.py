"""The choice of a codec as tables, with their boundaries."""

from __future__ import annotations

import pytest

from kvrelay.policy.codec import (
    BATCH_BYTES,
    MARGIN,
    RAW,
    CodecSpeed,
    break_even_bytes_s,
    choose_codec,
    transfer_s,
)
from kvrelay.types import Codec

GBIT = 125e6
LONG = 64 * BATCH_BYTES
LOSSLESS = CodecSpeed(codec=Codec.LOSSLESS, encode_bytes_s=0.5e9, decode_bytes_s=1e9, ratio=1.4)
INT8 = CodecSpeed(codec=Codec.INT8, encode_bytes_s=0.8e9, decode_bytes_s=0.9e9, ratio=2.0)
FP8 = CodecSpeed(codec=Codec.FP8, encode_bytes_s=0.4e9, decode_bytes_s=0.5e9, ratio=2.0)
ALL = (LOSSLESS, INT8, FP8)


@pytest.mark.parametrize(
    ("link_bytes_s", "lossy", "chosen"),
    [
        (None, None, Codec.RAW),
        (0.0, None, Codec.RAW),
        (0.1 * GBIT, None, Codec.LOSSLESS),
        (1 * GBIT, None, Codec.LOSSLESS),
        (10 * GBIT, None, Codec.RAW),
        (100 * GBIT, Codec.INT8, Codec.RAW),
        (1 * GBIT, Codec.INT8, Codec.INT8),
        (1 * GBIT, Codec.FP8, Codec.FP8),
        (4 * GBIT, Codec.INT8, Codec.INT8),
        (4 * GBIT, Codec.FP8, Codec.RAW),
    ],
)
def test_the_slower_the_link_the_more_a_codec_may_cost(
    link_bytes_s: float | None, lossy: Codec | None, chosen: Codec
) -> None:
    assert choose_codec(link_bytes_s, LONG, ALL, lossy, Codec.RAW).codec is chosen


def test_loss_is_never_chosen_where_it_is_not_allowed() -> None:
    for link_bytes_s in (1.0, 1e3, 1e6, 1e9, 1e12):
        for present in Codec:
            assert choose_codec(link_bytes_s, LONG, ALL, None, present).codec in (Codec.RAW, Codec.LOSSLESS)
            assert choose_codec(link_bytes_s, LONG, ALL, Codec.FP8, present).codec is not Codec.INT8


def test_what_one_end_cannot_use_is_not_chosen() -> None:
    assert choose_codec(GBIT, LONG, [], Codec.INT8, Codec.LOSSLESS).codec is Codec.RAW


def test_the_present_codec_stays_until_another_is_faster_by_the_margin() -> None:
    def at(link_bytes_s: float, present: Codec) -> Codec:
        return choose_codec(link_bytes_s, 1000 * BATCH_BYTES, [LOSSLESS], None, present).codec

    border = LOSSLESS.encode_bytes_s  # there both are equally fast
    assert at(border, Codec.RAW) is Codec.RAW
    assert at(border, Codec.LOSSLESS) is Codec.LOSSLESS
    assert at(border * (1 - MARGIN - 0.02), Codec.RAW) is Codec.LOSSLESS
    assert at(border * (1 - MARGIN + 0.03), Codec.RAW) is Codec.RAW
    assert at(border * (1 + MARGIN - 0.02), Codec.LOSSLESS) is Codec.LOSSLESS
    assert at(border * (1 + MARGIN + 0.02), Codec.LOSSLESS) is Codec.RAW


@pytest.mark.parametrize("size", [1, BATCH_BYTES - 1, BATCH_BYTES])
def test_one_batch_takes_all_stages_one_after_the_other(size: int) -> None:
    assert transfer_s(LOSSLESS, 1e9, size) == pytest.approx(size * (1 / 0.5e9 + 1 / 1.4e9 + 1 / 1e9))
    assert transfer_s(RAW, 1e9, size) == pytest.approx(size / 1e9)


def test_of_many_batches_all_but_the_first_take_the_slowest_stage() -> None:
    one = transfer_s(LOSSLESS, 1e9, BATCH_BYTES)
    assert transfer_s(LOSSLESS, 1e9, 11 * BATCH_BYTES) == pytest.approx(one + 10 * BATCH_BYTES / 0.5e9)
    assert transfer_s(LOSSLESS, 1e8, BATCH_BYTES * 2) - transfer_s(LOSSLESS, 1e8, BATCH_BYTES) == pytest.approx(
        BATCH_BYTES / 1.4e8
    )


def test_a_choice_says_what_each_candidate_would_have_taken() -> None:
    choice = choose_codec(GBIT, LONG, ALL, Codec.INT8, Codec.RAW)
    assert [codec for codec, _ in choice.seconds] == [Codec.RAW, Codec.LOSSLESS, Codec.INT8]
    assert min(choice.seconds, key=lambda pair: pair[1])[0] is choice.codec


def test_a_short_transfer_needs_a_slower_link_for_a_codec_to_pay() -> None:
    assert choose_codec(GBIT, BATCH_BYTES, [LOSSLESS], None, Codec.RAW).codec is Codec.RAW
    assert choose_codec(GBIT, LONG, [LOSSLESS], None, Codec.RAW).codec is Codec.LOSSLESS


def test_break_even_is_where_the_slower_end_keeps_up_with_the_link() -> None:
    assert break_even_bytes_s(LOSSLESS) == LOSSLESS.encode_bytes_s
    assert break_even_bytes_s(CodecSpeed(codec=Codec.FP8, encode_bytes_s=9e9, decode_bytes_s=2e9, ratio=2)) == 2e9
    assert break_even_bytes_s(RAW) == 0.0
