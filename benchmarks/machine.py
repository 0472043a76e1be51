"""The machine that benchmarks run on: figures of one mean little on another."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any

_MULTIPLIES_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """What the kernel says of the first core; nothing where there is no such file."""
    lines = _CPUINFO.read_text().split("\n\n")[0].splitlines() if _CPUINFO.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def fast_dtype() -> str:
    """bfloat16 where the cores multiply it; float32 elsewhere, where bfloat16 is emulated and ten times slower."""
    return "bfloat16" if _MULTIPLIES_BFLOAT16 & set(_cpuinfo().get("flags", "").split()) else "float32"


MULTIPLIES_BFLOAT16 = fast_dtype() == "bfloat16"
LONG_EVERY_S = 7.0 if MULTIPLIES_BFLOAT16 else 17.0
"""Between long prompts of the mixed load: they take half of a prefill worker's time, on either kind of machine."""
STREAM_OUTPUT_TOKENS = 200 if MULTIPLIES_BFLOAT16 else 100
"""Answers of the mixed load's streams: on either kind of machine a stream asks again about every twelve seconds."""


def describe() -> dict[str, Any]:
    """What a reader of results should know."""
    cpu = _cpuinfo().get("model name", platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(), "dtype": fast_dtype()}
