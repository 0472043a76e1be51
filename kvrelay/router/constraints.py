"""Schemas and grammars that no answer can meet, since they are defined by nothing but themselves: an engine takes them,
and fails at the first token. It must never refuse one that an answer could meet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

import msgspec

from kvrelay.errors import BadRequest

MAX_CHARS = 1 << 16
"""Longest grammar, or schema that comes as text, that is looked at: the event loop waits meanwhile."""
MAX_STEPS = 1000
"""References of a schema that are followed. Who has more is the worker's to judge."""
_RULE = re.compile(r"^[ \t]*([A-Za-z_][\w-]*)[ \t]*::=", re.MULTILINE)
_FIRST = re.compile(r"\s*([A-Za-z_][\w-]*)(?![\w-])")
_OPTIONAL = frozenset("|?*{(#")
"""A rule in which none of them stands, in a text or not, has one way to be met, and has to begin as it says."""


def check_constraints(body: Mapping[str, object]) -> None:
    """Raises ``BadRequest``."""
    for param, schema in _schemas(body):
        if (ref := circular_ref(schema)) is not None:
            said = f"the $ref {ref[:200]!r} leads back to itself, so that no answer can match; say what is there"
            raise BadRequest(said, param=param)
    outputs = body.get("structured_outputs")
    grammar = outputs.get("grammar") if isinstance(outputs, dict) else None
    if isinstance(grammar, str) and len(grammar) <= MAX_CHARS and is_circular(grammar):
        said = "the rule root begins with itself alone, so that no answer can match; give it another way to begin"
        raise BadRequest(said, param="structured_outputs")


def _schemas(body: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    outputs = body.get("structured_outputs")
    if isinstance(outputs, dict) and outputs.get("json") is not None:
        yield "structured_outputs", _read(outputs["json"])
    wanted = body.get("response_format")
    named = wanted.get("json_schema") if isinstance(wanted, dict) else None
    if isinstance(named, dict) and named.get("schema") is not None:
        yield "response_format", _read(named["schema"])


def _read(schema: object) -> object:
    """It may come as text. What is no JSON is for the worker to refuse."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema) if len(schema) <= MAX_CHARS else None
    except (msgspec.DecodeError, RecursionError):
        return None


def circular_ref(schema: object) -> str | None:
    """A reference that each answer to ``schema`` has to meet, and that leads, from one to the next, to itself.

    One that none of them has to meet is the worker's to judge: it stands in a property that may be absent, in an array
    that may be empty, in a definition that nobody uses, or is a value and no schema.
    """
    met: set[str] = set()
    parts = [schema]
    while parts:
        part = parts.pop()
        chain: set[str] = set()
        while (ref := _next(part)) is not None and ref not in met:
            if ref in chain:
                return ref
            if len(met) + len(chain) >= MAX_STEPS:
                return None
            chain.add(ref)
            part = _target(schema, ref)
        met |= chain
        if ref is None:
            parts += _required_parts(part)
    return None


def _required_parts(node: object) -> list[object]:
    """Schemas of the properties that an object of ``node`` cannot be without."""
    if not isinstance(node, dict) or node.get("type") != "object":
        return []
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return []
    names = {name for name in required if isinstance(name, str)}
    return [part for name, part in properties.items() if name in names]


def _next(node: object) -> str | None:
    """The reference that ``node`` has to meet; one of several ways is none."""
    while isinstance(node, dict):
        if isinstance(ref := node.get("$ref"), str):
            return ref
        only = [ways for key in ("allOf", "anyOf", "oneOf") if isinstance(ways := node.get(key), list)]
        node = only[0][0] if len(only) == 1 and len(only[0]) == 1 else None
    return None


def _target(schema: object, ref: str) -> object:
    """Where a reference within ``schema`` leads; None for any other one."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    node = schema
    for step in unquote(ref[2:]).split("/") if len(ref) > 1 else ():
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node


def is_circular(grammar: str) -> bool:
    """Whether the rule ``root`` of an EBNF grammar begins with rules alone that begin, in the end, with it."""
    rules = _RULE.split(grammar)[1:]
    bodies, counts = dict(zip(rules[::2], rules[1::2], strict=True)), Counter(rules[::2])
    name, seen = "root", set[str]()
    while name in bodies and name not in seen and counts[name] == 1:
        seen.add(name)
        first = None if _OPTIONAL & set(bodies[name]) else _FIRST.match(bodies[name])
        name = first[1] if first is not None else ""
    return name in seen
