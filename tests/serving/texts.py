"""Prompts of exact lengths in tokens, each with a beginning of its own, so that no two share a page."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer

_SENTENCES = (
    "The lighthouse keeper counted the ships that passed before midnight and wrote their names in a book. ",
    "Every river in the valley was named after an animal that nobody there had ever seen alive. ",
    "She mended the clock on Tuesday, and on Wednesday it began to run backwards, slowly and with great care. ",
    "The museum bought the painting for its frame, and found out only later who had made it. ",
    "Bread was baked at four, sold at six and forgotten by noon, except by the birds behind the mill. ",
    "A letter that arrives a year late is read more slowly than one that comes in time. ",
    "They built the bridge from both sides and met in the middle with a gap as wide as a hand. ",
    "In the last carriage of the train a man explained to his dog why they had to leave the city. ",
)


@functools.cache
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def token_ids(model: Path, tokens: int, number: int) -> list[int]:
    """Prompt ``number`` as exactly ``tokens`` token ids."""
    order = [_SENTENCES[(number * 3 + i * (1 + number % 5)) % len(_SENTENCES)] for i in range(2 + tokens // 8)]
    ids: list[int] = _tokenizer(model).encode(f"Story {number}. " + "".join(order), add_special_tokens=False).ids
    start = number % 3 if tokens < 4 else 0
    assert len(ids) >= tokens + start
    return ids[start : start + tokens]
