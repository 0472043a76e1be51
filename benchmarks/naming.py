"""How long it takes to name the pages of a prompt, in CPU time. A router does this for every request.

Run:  python -m benchmarks.naming
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from benchmarks.machine import describe
from kvrelay.identity import NAMING_VERSION, name_pages, root_name
from kvrelay.types import Fingerprint, PageFormat

PAGE_TOKENS = 32
ROUNDS = 200
LENGTHS = (100, 1_000, 10_000, 100_000)
RESULTS = Path(__file__).parent / "results" / "naming.json"


def fingerprint() -> Fingerprint:
    """That of SmolLM2-135M in bfloat16."""
    form = PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=PAGE_TOKENS)
    return Fingerprint(weights="weights", weights_epoch=0, format=form, naming=NAMING_VERSION, engine="none")


def median_s(prompt_tokens: int) -> float:
    """Median time to name one prompt of ``prompt_tokens`` tokens, its root included."""
    model, tokens = fingerprint(), list(range(prompt_tokens))
    times: list[float] = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        name_pages(root_name(model), tokens, PAGE_TOKENS)
        times.append(time.process_time() - begin)
    return statistics.median(times)


def main() -> None:
    found = {str(tokens): round(1e3 * median_s(tokens), 4) for tokens in LENGTHS}
    for tokens, took_ms in found.items():
        print(f"naming {int(tokens):>7,} tokens: {took_ms:8.3f} ms")
    RESULTS.write_text(
        json.dumps({"machine": describe(), "page_tokens": PAGE_TOKENS, "cpu_ms_by_tokens": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
