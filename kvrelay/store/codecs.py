"""The codecs of one store: what its configuration allows, and how fast they proved to be on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from kvrelay.config import StoreConfig
from kvrelay.errors import Misconfigured
from kvrelay.policy.codec import CodecSpeed, choose_codec
from kvrelay.store.codec import Run, decode, encode, size_bytes, usable
from kvrelay.store.pace import Pace
from kvrelay.store.packing import Packed, pack
from kvrelay.types import DTYPE_BYTES, Codec, PageFormat

_SAMPLE_ELEMENTS = 1 << 18
_RUN_ELEMENTS = 1 << 11
"""K of one head of a page of 32 tokens."""
_ROUNDS = 3
THREADS = 2
"""One of them keeps ahead of any link that is worth it; a second one hides its start."""


class Codecs:
    """Which codec to propose for a push, and which ones to take."""

    def __init__(
        self,
        config: StoreConfig,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._config = config
        self._clock = clock
        self.speeds: dict[str, list[CodecSpeed]] = {}
        """How fast each codec is, by dtype of pages, once it is known."""
        self._spawn = spawn
        self._paces: dict[tuple[Codec, str], Pace] = {}
        self._threads = asyncio.Semaphore(THREADS)

    def __repr__(self) -> str:
        return f"<Codecs {self._config.codec}, {sum(map(len, self.speeds.values()))} measured>"

    def measure(self, dtype: str) -> None:
        """Find out how fast this machine is: some 10 ms of one core, on a thread."""
        candidates = [codec for codec in (Codec.LOSSLESS, self._config.lossy) if codec is not None]
        self.speeds[dtype] = [_speed(codec, dtype) for codec in candidates if usable(codec)]

    def propose(self, format: PageFormat, size_bytes: int, link_bytes_s: float | None, present: Codec) -> Codec:
        """The codec for a push of ``size_bytes`` over a link of that speed (None: not known).

        The first one is RAW: it is when a codec is first thought of that its speed is measured.
        """
        if self._config.codec == "lossless":
            return Codec.LOSSLESS
        if link_bytes_s is None or self._config.codec == "raw":
            return Codec.RAW
        if format.dtype not in self.speeds:
            self.speeds[format.dtype] = []
            self._spawn(asyncio.to_thread(self.measure, format.dtype))
        speeds = [self._now(speed, format.dtype) for speed in self.speeds[format.dtype]]
        return choose_codec(link_bytes_s, size_bytes, speeds, format.lossy, present).codec

    def accept(self, proposed: Codec, format: PageFormat) -> Codec:
        """``proposed``, or ``RAW`` when this store does not take it for such pages."""
        allowed = proposed in (Codec.LOSSLESS, format.lossy) and self._config.codec != "raw"
        return proposed if allowed and usable(proposed) else Codec.RAW

    def _now(self, speed: CodecSpeed, dtype: str) -> CodecSpeed:
        """``speed`` as it is lately: a machine whose cores compute has little time to encode."""
        pace = self._paces.get((speed.codec, dtype))
        seen = None if pace is None else pace.bytes_s(self._clock())
        return speed if seen is None else msgspec.structs.replace(speed, encode_bytes_s=seen)

    async def pack(
        self, codec: Codec, views: Sequence[memoryview], sums: Iterable[list[int]], format: PageFormat
    ) -> Packed | None:
        """``packing.pack`` on a thread, so that the loop serves others meanwhile."""
        pace = self._paces.setdefault((codec, format.dtype), Pace())
        async with self._threads:
            pace.begin(self._clock())
            try:
                return await asyncio.to_thread(pack, codec, views, sums, format)
            finally:
                pace.end(sum(map(len, views)), self._clock())


def check_codecs(config: StoreConfig) -> None:
    """Raise ``Misconfigured`` when the settings cannot all have an effect here."""
    if config.codec == "lossless" and not usable(Codec.LOSSLESS):
        raise Misconfigured("store.codec = lossless needs the package zstandard; install it, or take auto or raw")
    if config.codec != "auto" and config.lossy is not None:
        raise Misconfigured(f"store.codec = {config.codec} never rounds; leave out store.lossy_codec, or take auto")


def _speed(codec: Codec, dtype: str) -> CodecSpeed:
    """Measured on normal numbers, which pack as real KV does (docs/decisions/0011)."""
    sample = _sample(dtype)
    runs = [Run(memoryview(sample), _RUN_ELEMENTS * DTYPE_BYTES[dtype])]
    payload = b"".join(encode(codec, runs, dtype))
    encode_s = _best(lambda: encode(codec, runs, dtype))
    decode_s = _best(lambda: decode(codec, memoryview(payload), len(sample), dtype))
    return CodecSpeed(
        codec=codec,
        encode_bytes_s=len(sample) / encode_s,
        decode_bytes_s=len(sample) / decode_s,
        ratio=len(sample) / size_bytes([payload]),
    )


def _sample(dtype: str) -> bytes:
    values = np.random.default_rng(0).standard_normal(_SAMPLE_ELEMENTS, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def _best(act: Callable[[], object]) -> float:
    """Shortest of a few runs, in seconds: the others met somebody else's work."""
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return max(min(times), 1e-9)
