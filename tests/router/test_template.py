"""Tests of router/template.py: every chat template gives what Hugging Face's library makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.errors import Malformed, Misconfigured
from kvrelay.router.template import read_template
from kvrelay.router.tokens import load_tokens
from tests.router.tiny_tokenizer import make_tokenizer

CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": " Grüße,\n世界 "},
    {"role": "assistant", "content": "Hi!\n"},
    {"role": "user", "content": "x"},
]
LOOP = "{% for message in messages %}{{ bos_token }}[{{ message['role'] }}] {{ message['content'] | trim }}{% endfor %}"
TEMPLATES = (
    LOOP,
    LOOP + "{% if add_generation_prompt %}\n    {% if tools %}tools{% endif %}\n  assistant:{% endif %}",
    "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ message | tojson }}{% endfor %}",
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% endif %}{% endfor %}{{ eos_token }}{{ pad_token }}",
    "{%- set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}{% endfor %}{{ ns.last }}",
    "{{ messages | tojson(indent=2) }} {{ strftime_now('%Y') }}",
    "{% macro say(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path)


def configure(folder: Path, **settings: object) -> None:
    """Change the folder's tokenizer configuration."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.slow
@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_renders_as_the_library_renders_it(folder: Path, source: str) -> None:
    from transformers import AutoTokenizer

    configure(folder, chat_template=source, bos_token={"__type": "AddedToken", "content": "<|endoftext|>"})
    library = AutoTokenizer.from_pretrained(str(folder))
    expected = library.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert read_template(folder).render(CHAT) == expected


def test_a_template_in_a_file_of_its_own_goes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("file")
    assert read_template(folder).render(CHAT) == "file"


def test_of_several_templates_the_default_one_is_taken(folder: Path) -> None:
    configure(folder, chat_template=[{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}])
    assert read_template(folder).render(CHAT) == "b"


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ messages[9].content.x }}", "{{ 1 + 'x' }}", None, [{"name": "rag"}]]
)
def test_what_a_template_refuses_is_malformed(folder: Path, source: object) -> None:
    configure(folder, chat_template=source)
    with pytest.raises(Malformed):
        read_template(folder).render(CHAT)


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"])
def test_a_template_can_neither_change_the_messages_nor_reach_python(folder: Path, source: str) -> None:
    configure(folder, chat_template=source)
    before = list(CHAT)
    with pytest.raises(Malformed):
        read_template(folder).render(CHAT)
    assert before == CHAT


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_cannot_be_read_are_said_to_be(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(Misconfigured, match="no tokenizer that can be read"):
        load_tokens(folder)


def test_a_template_that_is_none_is_said_to_be(folder: Path) -> None:
    configure(folder, chat_template="{% for %}")
    with pytest.raises(Misconfigured, match="no tokenizer that can be read"):
        load_tokens(folder)
