"""What the codecs of slow links save, cost and lose on the KV of a real model.

Run:  python -m benchmarks.codec [speed] [loss]     (SmolLM2 through transformers on one core; two minutes for both)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.codecs.loss import measure_loss
from benchmarks.codecs.real_kv import RealModel
from benchmarks.codecs.speed import measure_speed

RESULTS = Path(__file__).parent / "results" / "codec.json"
DTYPES = ("bfloat16", "float32")
PARTS = ("speed", "loss")


def measure(parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """By dtype of the KV: ``speed`` of every codec, and what the lossy ones do to logprobs (``loss``)."""
    rows: dict[str, Any] = {dtype: {} for dtype in DTYPES}
    if "speed" in parts:
        for dtype in DTYPES:
            rows[dtype]["speed"] = measure_speed(RealModel(dtype))
    if "loss" in parts:
        for dtype, table in measure_loss(DTYPES).items():
            rows[dtype]["loss"] = table
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the codecs of slow links on the KV of a real model.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; both without")
    parts = parser.parse_args(arguments).parts
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    rows = measure(parts or PARTS)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    merged = {dtype: known.get(dtype, {}) | found for dtype, found in rows.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(merged, indent=1) + "\n")
    for dtype, tables in rows.items():
        for part, table in tables.items():
            print(f"\n{dtype}, {part}")
            for name, row in table.items():
                print(f"  {name:42}", "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
