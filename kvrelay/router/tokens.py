"""The model's tokenizer and chat template, in this process. It must never block the event loop on a long text, and
never needs torch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from kvrelay.errors import Malformed, Misconfigured

INLINE_CHARS = 8_000
"""A request whose texts are up to this long in all (about 1 ms) is encoded on the loop: a thread hop costs as much."""

MESSAGE_CHARS = 40
"""What the template of one message costs, as characters: thousands of empty messages take long as well."""

T = TypeVar("T")


class Tokens:
    """A Hugging Face tokenizer, twice: for the loop and for one thread, since it may not be shared."""

    def __init__(self, tokenizer: Any) -> None:
        self._near = tokenizer
        self._far = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvrelay-tokens")
        self.max_chars_per_token: int = max(map(len, tokenizer.get_vocab()), default=1)

    def __repr__(self) -> str:
        return f"<Tokens {type(self._near).__name__}, {len(self._near)} ids>"

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of ``text``; ``special`` adds the model's BOS and the like."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """Ids of each text, with other requests' texts between them when they are long in all."""
        if sum(map(len, texts)) <= INLINE_CHARS:
            return [_encode(self._near, text, special) for text in texts]
        return [await self._away(_encode, text, special) for text in texts]

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a templated chat that asks for an answer. Raises ``Malformed`` when the template refuses it."""
        chars = sum(MESSAGE_CHARS + len(message["content"]) for message in messages)
        if chars <= INLINE_CHARS:
            return _encode(self._near, _template(self._near, messages), False)
        return await self._away(_encode, await self._away(_template, messages), False)

    async def _away(self, work: Callable[..., T], *given: Any) -> T:
        """``work`` in the thread, with its own tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._far, *given)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _template(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise Malformed(f"the chat template refused the messages: {error}") from error
    return text


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return ids


def load_tokens(model_path: Path) -> Tokens:
    """The tokenizer in a model folder. Takes seconds. Raises ``Misconfigured``."""
    # Imported here: it takes seconds, and only the router needs it.
    from transformers import AutoTokenizer

    if not model_path.is_dir():
        raise Misconfigured(f"model.path {model_path} is no folder; run 'kvrelay model fetch' or give another folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise Misconfigured(f"model.path {model_path} holds no tokenizer that can be read: {error}") from error
    # Silences a warning per long prompt: the worker judges lengths.
    tokenizer.model_max_length = 1 << 60
    return Tokens(tokenizer)
