"""Which codec a store proposes and takes: by its settings, by what it measured, and never loss that was not named."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from kvrelay.config import StoreConfig
from kvrelay.errors import Misconfigured
from kvrelay.policy.codec import CodecSpeed
from kvrelay.store import codec as codec_module
from kvrelay.store.codec import usable
from kvrelay.store.codecs import Codecs, check_codecs
from kvrelay.store.pace import FRESH_S
from kvrelay.types import DTYPE_BYTES, Codec, PageFormat

EXACT = PageFormat(layers=4, kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=32)
ROUNDED = msgspec.structs.replace(EXACT, lossy=Codec.INT8)
SIZE = 64 << 20
GBIT = 125e6
needs_zstandard = pytest.mark.skipif(not usable(Codec.LOSSLESS), reason="zstandard is not installed")


def not_now(work: Coroutine[Any, Any, None]) -> None:
    """Work that is not done while the test runs."""
    work.close()


def measured(config: StoreConfig, clock: Callable[[], float] = lambda: 0.0) -> Codecs:
    codecs = Codecs(config, clock, not_now)
    for dtype in DTYPE_BYTES:
        codecs.measure(dtype)
    return codecs


@needs_zstandard
def test_a_slow_link_gets_packed_pages_and_a_fast_or_unknown_one_raw_ones() -> None:
    codecs = measured(StoreConfig())
    assert codecs.propose(EXACT, SIZE, 0.1 * GBIT, Codec.RAW) is Codec.LOSSLESS
    assert codecs.propose(EXACT, SIZE, 1000 * GBIT, Codec.RAW) is Codec.RAW
    assert codecs.propose(EXACT, SIZE, None, Codec.LOSSLESS) is Codec.RAW


@needs_zstandard
async def test_a_speed_is_measured_once_and_until_then_all_travels_raw() -> None:
    works: list[Coroutine[Any, Any, None]] = []
    codecs = Codecs(StoreConfig(), lambda: 0.0, works.append)
    assert codecs.propose(EXACT, SIZE, None, Codec.RAW) is Codec.RAW
    assert works == []
    for _ in range(2):
        assert codecs.propose(EXACT, SIZE, 0.01 * GBIT, Codec.RAW) is Codec.RAW
    (work,) = works
    await work
    assert codecs.propose(EXACT, SIZE, 0.01 * GBIT, Codec.RAW) is Codec.LOSSLESS


def test_only_pages_whose_names_say_so_are_rounded() -> None:
    codecs = measured(StoreConfig(lossy_codec="int8"))
    assert codecs.propose(ROUNDED, SIZE, 0.01 * GBIT, Codec.RAW) is Codec.INT8
    assert codecs.propose(EXACT, SIZE, 0.01 * GBIT, Codec.RAW) is not Codec.INT8
    assert codecs.accept(Codec.INT8, ROUNDED) is Codec.INT8
    assert codecs.accept(Codec.FP8, ROUNDED) is Codec.RAW
    assert codecs.accept(Codec.INT8, EXACT) is Codec.RAW


def test_the_pages_own_format_decides_what_is_taken_and_not_the_receivers_settings() -> None:
    assert Codecs(StoreConfig(), lambda: 0.0, not_now).accept(Codec.INT8, ROUNDED) is Codec.INT8


@needs_zstandard
def test_settings_can_name_the_codec() -> None:
    raw, lossless = measured(StoreConfig(codec="raw")), Codecs(StoreConfig(codec="lossless"), lambda: 0.0, not_now)
    assert raw.propose(EXACT, SIZE, 0.01 * GBIT, Codec.RAW) is Codec.RAW
    assert raw.accept(Codec.LOSSLESS, EXACT) is Codec.RAW
    assert lossless.propose(EXACT, SIZE, 1000 * GBIT, Codec.RAW) is Codec.LOSSLESS
    assert lossless.accept(Codec.LOSSLESS, EXACT) is Codec.LOSSLESS


def test_without_zstandard_nothing_is_packed_and_asking_for_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "zstandard", None)
    codecs = measured(StoreConfig())
    assert codecs.propose(EXACT, SIZE, 0.01 * GBIT, Codec.RAW) is Codec.RAW
    assert codecs.accept(Codec.LOSSLESS, EXACT) is Codec.RAW
    check_codecs(StoreConfig())
    with pytest.raises(Misconfigured, match="zstandard"):
        check_codecs(StoreConfig(codec="lossless"))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_rounding_that_can_never_happen_is_an_error(codec: str) -> None:
    if codec == "lossless" and not usable(Codec.LOSSLESS):
        pytest.skip("zstandard is not installed")
    check_codecs(StoreConfig(codec=codec))
    with pytest.raises(Misconfigured, match=r"store\.lossy_codec"):
        check_codecs(StoreConfig(codec=codec, lossy_codec="fp8"))


@pytest.mark.parametrize("lossy", ["int8", "fp8"])
def test_every_codec_is_measured_for_every_dtype_of_pages(lossy: str) -> None:
    speeds: dict[str, list[CodecSpeed]] = measured(StoreConfig(lossy_codec=lossy)).speeds
    wanted = [codec for codec in (Codec.LOSSLESS, Codec(lossy)) if usable(codec)]
    assert {dtype: [speed.codec for speed in row] for dtype, row in speeds.items()} == dict.fromkeys(
        DTYPE_BYTES, wanted
    )
    assert all(speed.encode_bytes_s > 0 and speed.decode_bytes_s > 0 for row in speeds.values() for speed in row)


@needs_zstandard
async def test_a_machine_that_has_no_time_to_encode_goes_back_to_raw_and_tries_again_later() -> None:
    class Slow:
        """A clock that goes an hour on at each look while work is timed."""

        step = 3600.0
        now = 0.0

        def __call__(self) -> float:
            self.now += self.step
            return self.now

    clock = Slow()
    codecs = measured(StoreConfig(), clock)
    codecs.speeds = {EXACT.dtype: [CodecSpeed(codec=Codec.LOSSLESS, encode_bytes_s=1e9, decode_bytes_s=1e9, ratio=1.5)]}
    clock.step = 0.0
    assert codecs.propose(EXACT, SIZE, GBIT, Codec.RAW) is Codec.LOSSLESS
    clock.step = 3600.0
    await codecs.pack(Codec.LOSSLESS, [memoryview(bytes(EXACT.segment_bytes))], [[0]], EXACT)
    clock.step = 0.0
    assert codecs.propose(EXACT, SIZE, GBIT, Codec.LOSSLESS) is Codec.RAW
    clock.now += FRESH_S + 1
    assert codecs.propose(EXACT, SIZE, GBIT, Codec.RAW) is Codec.LOSSLESS
