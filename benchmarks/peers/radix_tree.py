"""Dynamo's RadixTree (Rust) under the same load as ``benchmarks.index``; run by it, in an environment of its own.

    python radix_tree.py CHAINS DEPTH HOLDERS SINGLES LOOKUPS

prints one line of JSON. It takes events as JSON bytes, which are made before the clock starts.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any


def rss_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def event(number: int, hashes: list[int], parent: int | None) -> bytes:
    """A stored event; the tree takes apart a block's own hash and that of its tokens, here they are one."""
    blocks = [{"block_hash": one, "tokens_hash": one} for one in hashes]
    return json.dumps(
        {"event_id": number, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0}
    ).encode()


def measure(tree: Any, chains: int, depth: int, holders: int, singles: int, lookups: int) -> dict[str, float]:
    dice = random.Random(1)
    prompts = [[dice.getrandbits(63) for _ in range(depth)] for _ in range(chains)]
    events = [event(number, prompt, None) for number, prompt in enumerate(prompts)]
    found: dict[str, float] = {}
    before, begin = rss_bytes(), time.process_time()
    for one in events:
        tree.apply_event(0, one)
    tree.find_matches(prompts[-1])  # events are applied by a thread: this waits for it
    found["blocks_per_s"] = chains * depth / (time.process_time() - begin)
    found["bytes_per_page"] = (rss_bytes() - before) / (chains * depth)
    asked = [prompts[dice.randrange(chains)] for _ in range(lookups)]
    found["lookups_per_s_1"] = lookup(tree, asked)
    for holder in range(1, holders):
        for one in events:
            tree.apply_event(holder, one)
    tree.find_matches(prompts[-1])
    found[f"lookups_per_s_{holders}"] = lookup(tree, asked)
    chain = [dice.getrandbits(63) for _ in range(singles)]
    loose = [event(number, [one], None) for number, one in enumerate(chain)]
    begin = time.process_time()
    for one in loose:
        tree.apply_event(0, one)
    tree.find_matches(chain[-1:])
    found["single_block_events_per_s"] = singles / (time.process_time() - begin)
    return found


def lookup(tree: Any, asked: list[list[int]]) -> float:
    """Lookups a second, the depth of every holder included."""
    begin = time.process_time()
    for prompt in asked:
        assert tree.find_matches(prompt).scores
    return len(asked) / (time.process_time() - begin)


def main() -> None:
    tree = importlib.import_module("dynamo._core").RadixTree()
    chains, depth, holders, singles, lookups = map(int, sys.argv[1:])
    print(json.dumps(measure(tree, chains, depth, holders, singles, lookups)))


if __name__ == "__main__":
    main()
