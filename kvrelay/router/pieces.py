"""Encodes a text piece by piece, most of them from memory: words repeat, and looking one up is faster than encoding.

It must never split where the tokenizer itself might not: the ids are always those of the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain, compress, count, filterfalse
from typing import Any, Protocol

from tokenizers import Tokenizer

_PIECE = re.compile(
    r"\s*+\S++(?:(?= [A-Za-z])|"  # nearly always: to find out at once takes a third less
    r"(?:(?![ \n][A-Za-z])\s++\S++)*+"  # white space within
    r"(?:\n(?=[A-Za-z])|\s++\Z)?)|"  # and at the end
    r"\s++\Z"  # a text of nothing else, which would otherwise be looked through again from each of its characters
)
"""Up to the next boundary: where a single blank or line's end stands between something else and an ASCII letter, before
the blank, and after the line's end.

Every pattern of ``_SPLITS``, and that of byte-level tokenizers, begins a new word there: a blank is only ever the first
character of one with letters, and a line's end never in one. Of longer white space the last character's word depends on
what follows. Python calls a few more characters white space than they do, which only makes pieces longer.
"""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = frozenset(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}" for digits in (r"\p{N}{1,3}", r"\p{N}")
)
"""Patterns that split a text into pieces: of Llama 3, and of Qwen 2 and 3."""

PIECE_CHARS = 64
"""Longer pieces are not kept: they hardly come again."""
MOST_PIECES = 1 << 16
"""Most pieces that are kept at a time: 15 MB."""
MOST_NEW = 256
"""Unknown pieces of one text beyond which it is encoded whole: a piece alone takes as long as four within a text."""
LITTLE_CHARS = 256
"""Characters of unknown pieces that are encoded in a tenth of a millisecond."""
FIRST_NEW = 64
"""How many of them are learned then: a twentieth more for a text of nothing but new words."""


class Encoder(Protocol):
    """Turns text into ids."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of ``text``; ``special`` adds the model's BOS and the like."""

    def known(self, text: str, *, special: bool) -> list[int] | None:
        """The same where nearly all of ``text`` need only be looked up; None elsewhere."""


class WholeEncoder:
    """An ``Encoder`` that encodes each text as a whole, without a memory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return "<WholeEncoder>"

    def encode(self, text: str, *, special: bool) -> list[int]:
        """See ``Encoder``."""
        # A batch is encoded outside Python's lock, a single text is not; "fast" leaves out where each token stands.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def known(self, text: str, *, special: bool) -> list[int] | None:
        """See ``Encoder``."""
        return None


class Pieces:
    """What pieces became, for any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """``tokenizer`` is one of which ``splits`` is true."""
        self._tokenizer = tokenizer
        self._whole = WholeEncoder(tokenizer)
        self._known: dict[str, tuple[int, ...]] = {}
        self._before, self._after = _added(tokenizer)

    def __repr__(self) -> str:
        return f"<Pieces {len(self._known)}>"

    def encode(self, text: str, *, special: bool) -> list[int]:
        """See ``Encoder``."""
        pieces, found, new = self._look(text)
        if not pieces or not self._fill(pieces, found, new):
            return self._whole.encode(text, special=special)
        return self._joined(found, special)

    def known(self, text: str, *, special: bool) -> list[int] | None:
        """See ``Encoder``."""
        pieces, found, new = self._look(text)
        if not pieces or sum(map(len, new)) > LITTLE_CHARS:
            return None
        self._fill(pieces, found, new)
        return self._joined(found, special)

    def _look(self, text: str) -> tuple[list[str], list[tuple[int, ...] | None], list[str]]:
        """The pieces of ``text``, what is known of each, and those of which nothing is, each once.

        No loop in Python: a prompt has thousands.
        """
        pieces, known = _PIECE.findall(text), self._known
        new = dict.fromkeys(filterfalse(known.__contains__, pieces))
        return pieces, list(map(known.get, pieces)), list(new)

    def _joined(self, found: list[tuple[int, ...] | None], special: bool) -> list[int]:
        ids: Iterator[int] = chain.from_iterable(found)  # type: ignore[arg-type]  # none is missing any more
        return [*self._before, *ids, *self._after] if special else list(ids)

    def _fill(self, pieces: list[str], found: list[tuple[int, ...] | None], new: list[str]) -> bool:
        """Encode what is missing; False when that is too much."""
        if not new:
            return True
        too_many = len(new) > MOST_NEW
        fresh = self._encoded(new[:FIRST_NEW] if too_many else new)
        self._keep(fresh)
        if too_many:
            return False
        for place in compress(count(), map(fresh.__contains__, pieces)):
            found[place] = fresh[pieces[place]]
        return True

    def _encoded(self, pieces: list[str]) -> dict[str, tuple[int, ...]]:
        if len(pieces) == 1 and len(pieces[0]) <= PIECE_CHARS:  # a batch of one takes a quarter more
            return {pieces[0]: tuple(self._tokenizer.encode(pieces[0], add_special_tokens=False).ids)}
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return {piece: tuple(each.ids) for piece, each in zip(pieces, encoded, strict=True)}

    def _keep(self, fresh: dict[str, tuple[int, ...]]) -> None:
        if len(self._known) > MOST_PIECES:
            self._known = {}  # those that are used come back with the next texts
        self._known.update({piece: ids for piece, ids in fresh.items() if len(piece) <= PIECE_CHARS})


def encoder(tokenizer: Tokenizer) -> Encoder:
    """The fastest way to encode with ``tokenizer``, whose texts are neither cut nor filled."""
    return Pieces(tokenizer) if splits(tokenizer) else WholeEncoder(tokenizer)


def splits(tokenizer: Tokenizer) -> bool:
    """Whether ``tokenizer`` surely begins a new word at every boundary between pieces."""
    model = tokenizer.model
    return (
        type(model).__name__ == "BPE"
        and not model.dropout
        and all(each["type"] == "NFC" for each in _parts(tokenizer.normalizer, "normalizers"))
        and _splits_words(_parts(tokenizer.pre_tokenizer, "pretokenizers"))
        and all(
            each["type"] in ("ByteLevel", "TemplateProcessing")
            for each in _parts(tokenizer.post_processor, "processors")
        )
        # Such a token is cut out of the text before anything else, and must not cover, or swallow, a boundary.
        and not any(
            " " in token.content or token.lstrip or token.rstrip or token.single_word
            for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Settings of a tokenizer's component, or of those that it is made of."""
    if component is None:
        return []
    settings: dict[str, Any] = json.loads(component.__getstate__())
    return list(settings[name]) if settings["type"] == "Sequence" else [settings]


def _splits_words(parts: list[dict[str, Any]]) -> bool:
    known = all(part["type"] == "Digits" or _is_byte_level(part) or _is_known_split(part) for part in parts)
    return known and any(part.get("use_regex") or part["type"] == "Split" for part in parts)


def _is_byte_level(part: dict[str, Any]) -> bool:
    return part["type"] == "ByteLevel" and not part["add_prefix_space"]


def _is_known_split(part: dict[str, Any]) -> bool:
    kind = part["type"], part.get("behavior"), part.get("invert")
    return kind == ("Split", "Isolated", False) and part["pattern"].get("Regex") in _SPLITS


def _added(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and after a text on request."""
    probe = "a"
    plain: list[int] = tokenizer.encode(probe, add_special_tokens=False).ids
    special: list[int] = tokenizer.encode(probe, add_special_tokens=True).ids
    at = next(at for at in range(len(special)) if special[at : at + len(plain)] == plain)
    return special[:at], special[at + len(plain) :]
