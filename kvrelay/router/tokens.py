"""The model's tokenizer and chat template, in this process. It must never block the event loop on a long text, and
never needs torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jinja2
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvrelay.errors import Misconfigured
from kvrelay.router.pieces import encoder
from kvrelay.router.template import ChatTemplate, read_template

INLINE_CHARS = 2_000
"""A request whose texts are up to this long in all (about 1 ms) is encoded on the loop: a thread hop costs as much."""

LOOKUP_CHARS = 32_000
"""A request whose texts are up to this long in all is looked up on the loop, which takes 1 to 2 ms, if hardly any of it
has to be encoded: a thread would hold Python's lock meanwhile, and the hop to it comes on top."""

MESSAGE_CHARS = 40
"""What the template of one message costs, as characters: thousands of empty messages take long as well."""

MAX_THREADS = 4
"""Encoding runs outside Python's lock, so that threads are as good as cores."""

_UPSET = "Invalid prefix encountered"
INLINE_IDS = 256
"""Ids that are turned into text on the loop: about 1 ms as well."""

T = TypeVar("T")


class Decoder:
    """Token ids to text, one after the other, as the engine does it: a character comes with its last token."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], *, skip_special: bool) -> None:
        """``prompt``: what a tokenizer writes for a token depends on those before it."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(ids=prompt, skip_special_tokens=skip_special)

    def __repr__(self) -> str:
        return f"<Decoder, special tokens {'skipped' if self._skip_special else 'shown'}>"

    def step(self, token: int) -> str:
        """What ``token`` adds to the text."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # border: the library raises nothing narrower
            if not str(error).startswith(_UPSET):
                raise
            # Bytes that are no UTF-8 upset it; the engine begins anew as well.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._tokenizer, token) or ""


class Tokens:
    """A tokenizer that nobody changes, which any thread may use, and the template that goes with it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._encoder = encoder(tokenizer)
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="kvrelay-tokens")
        self.max_chars_per_token: int = max(map(len, tokenizer.get_vocab()), default=1)

    def __repr__(self) -> str:
        return f"<Tokens, {self._tokenizer.get_vocab_size()} ids>"

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of ``text``; ``special`` adds the model's BOS and the like."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """Ids of each text, with other requests' texts between them when they are long in all."""
        chars = sum(map(len, texts))
        if chars <= INLINE_CHARS:
            return [self._encode(text, special) for text in texts]
        known = [self._encoder.known(text, special=special) for text in texts] if chars <= LOOKUP_CHARS else [None]
        looked_up = [ids for ids in known if ids is not None]
        if len(looked_up) == len(texts):
            return looked_up
        return [await self._away(self._encode, text, special) for text in texts]

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a templated chat that asks for an answer. Raises ``Malformed`` when the template refuses it."""
        chars = sum(MESSAGE_CHARS + len(message["content"]) for message in messages)
        if chars > LOOKUP_CHARS or MESSAGE_CHARS * len(messages) > INLINE_CHARS:
            return await self._away(self._encode_chat, messages)
        return await self.encode(self._template.render(messages), special=False)

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self._encode(self._template.render(messages), False)

    def _encode(self, text: str, special: bool) -> list[int]:
        return self._encoder.encode(text, special=special)

    async def text_after(self, prompt: list[int], ids: Sequence[int], *, skip_special: bool) -> tuple[Decoder, str]:
        """The text of ``ids`` after ``prompt``, and what goes on from there."""
        if len(ids) <= INLINE_IDS:
            return self._text_after(prompt, ids, skip_special)
        return await self._away(self._text_after, prompt, ids, skip_special)

    def _text_after(self, prompt: list[int], ids: Sequence[int], skip_special: bool) -> tuple[Decoder, str]:
        decoder = Decoder(self._tokenizer, prompt, skip_special=skip_special)
        return decoder, "".join(map(decoder.step, ids))

    async def _away(self, work: Callable[..., T], *given: object) -> T:
        """``work`` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def load_tokens(model_path: Path) -> Tokens:
    """The tokenizer in a model folder. Raises ``Misconfigured``."""
    if not model_path.is_dir():
        raise Misconfigured(f"model.path {model_path} is no folder; run 'kvrelay model fetch' or give another folder")
    # A batch of one gains nothing from the library's own threads, and the hop to one costs.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = _read(model_path)
        template = read_template(model_path)
    except (OSError, ValueError, KeyError, AttributeError, jinja2.TemplateError) as error:
        raise Misconfigured(f"model.path {model_path} holds no tokenizer that can be read: {error}") from error
    # A file may say how training cut and filled texts; here the worker judges lengths.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokens(tokenizer, template)


def _read(folder: Path) -> Tokenizer:
    """Raises ``OSError``, ``ValueError``, ``AttributeError``."""
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # border: the library raises nothing narrower
            raise ValueError(str(error)) from error
    # Files of other kinds are converted by a library that takes seconds and imports torch where there is one.
    from transformers import AutoTokenizer

    converted: Tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    return converted
