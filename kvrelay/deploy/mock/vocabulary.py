"""The words of mock answers: tokens of the model's tokenizer whose text is a plain word, so that answers can be read.

It must never offer a token whose text depends on its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from kvrelay.errors import Misconfigured

_SPACES = "Ġ▁"
"""How tokenizers spell the blank before a word: byte-level ones, and those after SentencePiece."""
_WORD = re.compile(rf"[{_SPACES}]?[a-z]{{2,}}")
_MOST = 4096
_FEWEST = 8


class Vocabulary:
    """Token ids to write with, and the text of each."""

    def __init__(self, words: Mapping[int, str], end: int) -> None:
        self.words = tuple(words)
        self.end = end
        self._texts = {**words, end: ""}

    def __repr__(self) -> str:
        return f"<Vocabulary of {len(self.words)} words>"

    def text(self, token: int) -> str:
        """What ``token`` adds to an answer."""
        return self._texts[token]


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of the model in ``folder``. Raises ``Misconfigured``."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise Misconfigured(f"mock workers need {file}; choose a model with a fast tokenizer")
    known: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab()
    return vocabulary_of(known)


def vocabulary_of(known: Mapping[str, int]) -> Vocabulary:
    """Words of ``known`` (text to id): those after a blank where there are enough. Raises ``Misconfigured``."""
    words = sorted((id, text) for text, id in known.items() if _WORD.fullmatch(text))
    spaced = [(id, text) for id, text in words if text[0] in _SPACES]
    chosen = spaced if len(spaced) >= _FEWEST else words
    if len(chosen) < _FEWEST:
        raise Misconfigured(f"the tokenizer has only {len(chosen)} plain words; mock answers need {_FEWEST}")
    used = {id for id, _ in chosen[:_MOST]}
    end = next(id for id in range(len(known) + 1) if id not in used)
    return Vocabulary({id: " " + text[1:] if text[0] in _SPACES else text for id, text in chosen[:_MOST]}, end)
