"""A model's chat template, rendered as Hugging Face's library renders it, without that library: it imports torch, which
costs a router 300 MB. It must never be trusted by itself; see ``render``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from kvrelay.errors import Malformed

_FILE = "chat_template.jinja"
"""Goes before a template in the tokenizer's configuration."""
_CONFIGURATIONS = ("special_tokens_map.json", "tokenizer_config.json")
"""The second one wins."""


class ChatTemplate:
    """``source`` with the special tokens that it may name, such as ``bos_token``; empty where a model has none.

    Raises ``jinja2.TemplateError`` on a source that is no template.
    """

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        self._source = source
        self._specials = dict(specials)
        self._template = _environment().from_string(source)

    def __repr__(self) -> str:
        return f"<ChatTemplate of {len(self._source)} characters>"

    def render(self, messages: list[dict[str, str]]) -> str:
        """The text of a chat that asks for an answer. Raises ``Malformed`` when the template refuses it."""
        if not self._source:
            raise Malformed("the model has no chat template")
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._specials
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise Malformed(f"the chat template refused the messages: {error}") from error


def read_template(folder: Path) -> ChatTemplate:
    """The template in a model folder. Raises ``OSError``, ``ValueError``, ``jinja2.TemplateError``."""
    settings: dict[str, object] = {}
    for name in _CONFIGURATIONS:
        if (folder / name).is_file():
            settings |= msgspec.json.decode((folder / name).read_bytes(), type=dict[str, object])
    file = folder / _FILE
    source = file.read_text(encoding="utf-8") if file.is_file() else _default(settings.get("chat_template"))
    return ChatTemplate(source, {name: text for name, value in settings.items() if (text := _special(name, value))})


def _default(given: object) -> str:
    """One template, or several with names."""
    if isinstance(given, list):
        given = next((each.get("template") for each in given if each.get("name") == "default"), None)
    return given if isinstance(given, str) else ""


def _special(name: str, value: object) -> str:
    """The text of a special token, written plainly or with its properties; empty when ``name`` is none."""
    if not name.endswith("_token"):
        return ""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates of models are written for (transformers, ``chat_template_utils``)."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return made


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model wrote, for training; here it is nothing but its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
