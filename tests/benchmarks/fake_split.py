"""A split service without engines: its answers take no time, and their times are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.answers import Answer
from benchmarks.split import Handed

FLOOR_S = 0.040
GAP_S = 0.052


class FakeSplit:
    """Every prompt is handed over in ``GAP_S``, but for one-token prompts on D, which take ``FLOOR_S``."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Handed:
        self.prompts.append(list(prompt))
        await asyncio.sleep(0)
        return Handed(answer=_answer(max_tokens), prefill_s=1.0, gap_s=GAP_S)

    async def decode_only(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        await asyncio.sleep(0)
        return _answer(max_tokens)


def _answer(tokens: int) -> Answer:
    return Answer(request_id="r", sent_s=1.0, token_s=tuple(1.0 + FLOOR_S * (index + 1) for index in range(tokens)))
