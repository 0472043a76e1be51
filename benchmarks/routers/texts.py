"""Texts of about so many tokens, of common words."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

_WORDS = 2000
SHORT_TOKENS, LONG_TOKENS = 32, 4000
_DIFFERENT = 64


def texts(model: Path, tokens: int) -> list[str]:
    """Different texts whose words are one token each."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    words = [entry[1:] for entry, _ in entries if entry[0] == "Ġ" and entry[1:].isascii() and entry[1:].isalpha()]
    dice = random.Random(1)
    return [" ".join(dice.choices(words[:_WORDS], k=tokens)) for _ in range(_DIFFERENT)]
