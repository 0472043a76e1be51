"""A text that is encoded piece by piece gets the ids of the whole text, whatever it is made of."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from kvrelay.router import pieces
from kvrelay.router.pieces import MOST_NEW, Pieces, WholeEncoder, encoder, splits

WORDS = ["the", "quick", "brown", "fox", "over", "lazy", "it's", "we'll", "HE'LL", "don't", "x1", "22", "333", "4444"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
NO_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA, QWEN = sorted(pieces._SPLITS, key=len, reverse=True)


def split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), NO_REGEX])


KINDS: dict[str, tuple[PreTokenizer, Normalizer | None]] = {
    "GPT-2": (BYTE_LEVEL, None),
    "SmolLM2": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]), None),
    "Llama 3": (split(LLAMA), None),
    "Qwen 2": (split(QWEN), normalizers.NFC()),
}


def trained(words: PreTokenizer, normalizer: Normalizer | None = None) -> Tokenizer:
    """A tokenizer that has merged what it could: words, blanks, lines' ends, and what stands beside them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    dice = random.Random(1)
    blanks = [" ", "  ", "\n", "\n\n", " \n", "\n ", "\t", ".\n", "!\n\n", "\r\n"]
    texts = ["".join(dice.choice(WORDS) + dice.choice(blanks) for _ in range(200)) for _ in range(20)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return tokenizer


TOKENIZERS = {kind: trained(*how) for kind, how in KINDS.items()}
KNOWING = {kind: Pieces(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
"""They keep what the examples before taught them."""

BLANKS = [
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
    "\x0b",
    "\x1c",
    "\x85",
    "\xa0",
    "\u2000",
    "\u2028",
]
MARKS = [".", ",\n", "'", "'s", "’s", "<|", "|>", "\0"]
LETTERS = ["é", "e\u0301", "\u0301", "ß", "я", "中文", "٣", "Ⅷ", "🙂", "\u200d", "\ufeff"]
PARTS = st.sampled_from([*WORDS, *SPECIAL, *BLANKS, *MARKS, *LETTERS])
TEXTS = st.one_of(st.lists(PARTS, max_size=40).map("".join), st.text(max_size=60))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_any_text_gets_the_ids_of_the_whole(kind: str, text: str, special: bool) -> None:
    whole = WholeEncoder(TOKENIZERS[kind]).encode(text, special=special)
    assert KNOWING[kind].known(text, special=special) in (None, whole)
    assert KNOWING[kind].encode(text, special=special) == whole


def test_a_text_is_only_looked_up_when_hardly_any_of_it_is_new() -> None:
    knowing = Pieces(TOKENIZERS["GPT-2"])
    text = " ".join(WORDS)
    long = "x" * (pieces.LITTLE_CHARS + 1)
    assert knowing.known(f"{text} {long}", special=True) is None
    assert knowing.known(f"{text} news", special=True) == knowing.encode(f"{text} news", special=True)
    assert WholeEncoder(TOKENIZERS["GPT-2"]).known(text, special=True) is None


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_pieces_make_up_the_whole_text(text: str) -> None:
    assert "".join(pieces._PIECE.findall(text)) == text


@pytest.mark.slow
def test_no_text_is_looked_through_again_and_again() -> None:
    """Each takes milliseconds; a search that begins anew at every character takes minutes, and holds Python's lock."""
    code = (
        "from kvrelay.router.pieces import _PIECE\n"
        "for run in (' ', '\\n', ' \\n', '\\t', '\\u3000', 'a', '1', '.', '\\u0301', 'a ', 'a\\n', '. ', ' .  '):\n"
        "    for text in (run * 600_000, 'a' + run * 600_000, run * 600_000 + 'a'):\n"
        "        assert ''.join(_PIECE.findall(text)) == text"
    )
    subprocess.run([sys.executable, "-c", code], timeout=90, check=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [" ", "\n", "\t \n"])
def test_a_long_run_of_white_space_gets_the_ids_of_the_whole(kind: str, run: str) -> None:
    for text in (run * 9_000, run * 9_000 + "a", "a" + run * 9_000, run * 9_000 + "."):
        whole = WholeEncoder(TOKENIZERS[kind]).encode(text, special=True)
        assert KNOWING[kind].encode(text, special=True) == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_new_words_is_encoded_whole_and_some_of_them_are_learned(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    knowing, whole = Pieces(tokenizer), WholeEncoder(tokenizer)
    text = " ".join(f"a{number}" for number in range(4 * MOST_NEW))
    seen = []
    for _ in range(20):
        assert knowing.encode(text, special=False) == whole.encode(text, special=False)
        seen.append(repr(knowing))
    assert seen[0] == f"<Pieces {pieces.FIRST_NEW}>"
    assert seen[-1] == f"<Pieces {4 * MOST_NEW}>"


def test_what_is_remembered_is_bounded_and_long_pieces_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST_PIECES", 100)
    knowing = Pieces(TOKENIZERS["GPT-2"])
    for number in range(50):
        knowing.encode(" ".join(f"a{number}b{other}" for other in range(10)), special=False)
        assert len(knowing._known) <= 110
    before = len(knowing._known)
    assert knowing.encode("1" * 1000, special=False)
    assert len(knowing._known) == before


@pytest.mark.parametrize(
    "words",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        NO_REGEX,
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Metaspace(),
        split(r"\w+ \w+"),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA), "removed"), NO_REGEX]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA), "isolated", invert=True), NO_REGEX]),
    ],
)
def test_a_tokenizer_that_may_split_otherwise_is_given_whole_texts(words: PreTokenizer) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = words
    assert isinstance(encoder(tokenizer), WholeEncoder)


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<a b>", normalized=False),
        AddedToken("<a>", lstrip=True, normalized=False),
        AddedToken("<a>", rstrip=True, normalized=False),
        AddedToken("a", single_word=True, normalized=False),
    ],
)
def test_a_token_that_may_cover_a_boundary_rules_pieces_out(token: AddedToken) -> None:
    tokenizer = trained(BYTE_LEVEL)
    assert splits(tokenizer)
    tokenizer.add_tokens([token])
    assert not splits(tokenizer)


def test_words_that_change_with_their_context_rule_pieces_out() -> None:
    for normalizer in (normalizers.Lowercase(), normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])):
        assert not splits(trained(BYTE_LEVEL, normalizer))
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], dropout=0.1))
    tokenizer.pre_tokenizer = BYTE_LEVEL
    assert not splits(tokenizer)
    unlike = Tokenizer(models.Unigram([("a", 0.0)]))
    unlike.pre_tokenizer = BYTE_LEVEL
    assert not splits(unlike)
