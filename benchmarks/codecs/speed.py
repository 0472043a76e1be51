"""How much smaller codecs make real KV and how fast one core does it: the product's beside those rejected."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.codecs.real_kv import PAGE_TOKENS, RealModel, pages_of
from kvrelay.policy.codec import BATCH_BYTES, CodecSpeed, break_even_bytes_s
from kvrelay.store.codec import Run, decode, encode
from kvrelay.types import DTYPE_BYTES, Codec

TOKENS = 1024
ROUNDS = 5


class Way(NamedTuple):
    """One way to make a batch smaller, and back."""

    pack: Callable[[bytes], bytes]
    unpack: Callable[[bytes, int], Any]


def batches(model: RealModel) -> list[bytes]:
    """Layers of real pages, in messages as a store sends them."""
    kv = model.prefill(model.prompts(1, TOKENS))[0]
    pages = np.concatenate([page.reshape(model.format.layers, -1) for page in pages_of(kv)])
    together = BATCH_BYTES // model.format.segment_bytes
    return [pages[start : start + together].tobytes() for start in range(0, len(pages), together)]


def ways(dtype: str, head_dim: int) -> Iterator[tuple[str, Way]]:
    """The product's codecs, then others."""
    run_bytes = PAGE_TOKENS * head_dim * DTYPE_BYTES[dtype]
    for codec in (Codec.LOSSLESS, Codec.INT8, Codec.FP8):
        yield codec.value, _product(codec, dtype, run_bytes)
    import zstandard

    for level in (-3, 1, 3):
        plain = Way(zstandard.ZstdCompressor(level=level).compress, zstandard.ZstdDecompressor().decompress)
        yield f"zstd {level}, bytes as they lie", plain
        yield f"zstd {level}, highest bytes apart", _apart(plain, DTYPE_BYTES[dtype])
    yield "zlib, Huffman only, highest bytes apart", _apart(Way(_huffman, _inflate), DTYPE_BYTES[dtype])
    yield from _lz4(DTYPE_BYTES[dtype])


def _product(codec: Codec, dtype: str, run_bytes: int) -> Way:
    return Way(
        lambda data: b"".join(encode(codec, [Run(memoryview(data), run_bytes)], dtype)),
        lambda data, size: decode(codec, memoryview(data), size, dtype),
    )


def _lz4(width: int) -> Iterator[tuple[str, Way]]:
    try:
        from lz4 import block
    except ImportError:
        return  # no dependency of ours: measured where somebody has it
    plain = Way(lambda data: block.compress(data, store_size=False), lambda d, n: block.decompress(d, n))
    yield "lz4, highest bytes apart", _apart(plain, width)


def _huffman(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(data) + packer.flush()


def _inflate(data: bytes, size: int) -> bytes:
    return zlib.decompress(data, -15, size)


def _apart(way: Way, width: int) -> Way:
    """``way`` for the highest byte of each element; the others are copied, in both directions."""

    def pack(data: bytes) -> bytes:
        planes = np.frombuffer(data, np.uint8).reshape(-1, width).T
        return way.pack(planes[-1].tobytes()) + planes[:-1].tobytes()

    def unpack(data: bytes, size: int) -> Any:
        rest = size // width * (width - 1)
        planes = np.empty((size // width, width), np.uint8)
        planes[:, -1] = np.frombuffer(way.unpack(data[:-rest], size // width), np.uint8)
        planes.T[:-1] = np.frombuffer(data[-rest:], np.uint8).reshape(width - 1, -1)
        return planes

    return Way(pack, unpack)


def measure_speed(model: RealModel) -> dict[str, dict[str, float]]:
    """Ratio, and decoded GB/s of one core each way: the best of ``ROUNDS``."""
    data = batches(model)
    return {name: _row(way, data) for name, way in ways(model.format.dtype, model.format.head_dim)}


def _row(way: Way, data: list[bytes]) -> dict[str, float]:
    packed = [way.pack(batch) for batch in data]
    size = sum(map(len, data))
    encode_s = min(_seconds(lambda: [way.pack(batch) for batch in data]) for _ in range(ROUNDS))
    pairs = list(zip(packed, data, strict=True))
    decode_s = min(_seconds(lambda: [way.unpack(small, len(batch)) for small, batch in pairs]) for _ in range(ROUNDS))
    ratio = size / sum(map(len, packed))
    speed = CodecSpeed(
        codec=Codec.LOSSLESS, encode_bytes_s=size / encode_s, decode_bytes_s=size / decode_s, ratio=ratio
    )
    return {
        "ratio": round(ratio, 3),
        "encode_gb_s": round(size / encode_s / 1e9, 2),
        "decode_gb_s": round(size / decode_s / 1e9, 2),
        "break_even_gbit_s": round(8 * break_even_bytes_s(speed) / 1e9, 1),
    }


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
