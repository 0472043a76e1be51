"""What the codecs of slow links save, cost and lose on the KV of a real model.

Run:  python -m benchmarks.codec          (SmolLM2 through transformers on one core; about five minutes)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.codecs.loss import measure_loss
from benchmarks.codecs.real_kv import RealModel
from benchmarks.codecs.speed import measure_speed
from kvrelay.types import Codec

RESULTS = Path(__file__).parent / "results" / "codec.json"
DTYPES = ("bfloat16", "float32")


def measure() -> dict[str, Any]:
    """By dtype of the KV: speed of every codec, and what the lossy ones do to logprobs."""
    rows: dict[str, Any] = {}
    for dtype in DTYPES:
        model = RealModel(dtype)
        rows[dtype] = {
            "speed": measure_speed(model),
            "loss": measure_loss(model, (Codec.LOSSLESS, Codec.INT8, Codec.FP8)),
        }
    return rows


def main() -> None:
    rows = measure()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    for dtype, parts in rows.items():
        for part, table in parts.items():
            print(f"\n{dtype}, {part}")
            for name, row in table.items():
                print(f"  {name:42}", "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
