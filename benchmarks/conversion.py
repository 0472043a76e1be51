"""What loading pages of another KV type does to an answer: logprobs and greedy text against the same engine alone.

Run:  python -m benchmarks.conversion          (SmolLM2; a float32 and a bfloat16 engine, and a store)

The control is the engine against itself: the same prompt again, found in its own cache, so that the last token is
computed by another kernel than the first time. In float32 both should agree; in bfloat16 that alone moves logprobs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from benchmarks.pairs.site import Kind, Site
from kvrelay.deploy.model import fetch

SINGLE = Kind(dtype="float32", cpus="0", kv_cache_bytes=256 << 20)
HALF = Kind(dtype="bfloat16", cpus="1", kv_cache_bytes=256 << 20)
PROMPTS = 20
LENGTHS = (60, 130, 260, 400)
"""Tokens of the prompts, in turn; none is whole pages."""
ANSWER_TOKENS = 16
TOP = 20
RESULTS = Path(__file__).parent / "results" / "conversion.json"

Choice = dict[str, Any]


@dataclass(frozen=True)
class Error:
    """How far one way of getting an answer is from the engine's own, over all prompts."""

    pair: str
    max_logprob_difference: float
    """Largest difference over all prompts and the 20 likeliest first tokens."""
    mean_logprob_difference: float
    first_token_equal: float
    """Share of the prompts."""
    answer_equal: float
    """Share of the prompts whose 16 greedy tokens are all equal."""

    @property
    def row(self) -> str:
        return (
            f"{self.pair:34} {self.max_logprob_difference:9.4f} {self.mean_logprob_difference:9.4f} "
            f"{self.first_token_equal:9.1%} {self.answer_equal:9.1%}"
        )


def prompts(model: Path) -> list[list[int]]:
    """Pieces of this project's own documentation."""
    pages = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    step = len(ids) // PROMPTS
    assert step >= max(LENGTHS), "the documentation is too short for prompts that do not overlap"
    return [ids[number * step :][: LENGTHS[number % len(LENGTHS)]] for number in range(PROMPTS)]


def first_logprobs(choice: Choice) -> dict[str, float]:
    found: dict[str, float] = choice["logprobs"]["top_logprobs"][0]
    return found


def compare(pair: str, own: list[Choice], other: list[Choice]) -> Error:
    differences = []
    for mine, theirs in zip(own, other, strict=True):
        ours, others = first_logprobs(mine), first_logprobs(theirs)
        differences.append(max(abs(ours[token] - others[token]) for token in ours.keys() & others.keys()))
    ids = [(mine["token_ids"], theirs["token_ids"]) for mine, theirs in zip(own, other, strict=True)]
    return Error(
        pair=pair,
        max_logprob_difference=max(differences),
        mean_logprob_difference=statistics.fmean(differences),
        first_token_equal=statistics.fmean(mine[0] == theirs[0] for mine, theirs in ids),
        answer_equal=statistics.fmean(mine == theirs for mine, theirs in ids),
    )


async def measure(site: Site) -> list[Error]:
    wanted: Choice = {"max_tokens": ANSWER_TOKENS, "logprobs": TOP, "return_tokens_as_token_ids": True}
    asked = prompts(site.model)
    errors = []
    for prefill, decode in ((SINGLE, HALF), (HALF, SINGLE)):
        alone: Choice = {**wanted, "cache_salt": "alone"}
        own = [await site.ask(decode, ids, **alone) for ids in asked]
        again = [await site.ask(decode, ids, **alone) for ids in asked]
        converted = [await site.hand_over(prefill, decode, ids, **wanted) for ids in asked]
        errors.append(compare(f"{decode.dtype} again", own, again))
        errors.append(compare(f"{decode.dtype} from {prefill.dtype} pages", own, converted))
    return errors


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with aiohttp.ClientSession() as http, Site(Path(folder), fetch(), http).open([SINGLE, HALF]) as site:
            errors = await measure(site)
    print(f"{'':34} {'max':>9} {'mean':>9} {'1st equal':>9} {'all equal':>9}")
    for error in errors:
        print(error.row)
    RESULTS.write_text(json.dumps([asdict(error) for error in errors], indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
