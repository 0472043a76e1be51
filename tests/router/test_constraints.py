"""Schemas and grammars that no answer can meet are refused; those that one can meet are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.errors import BadRequest
from kvrelay.router.constraints import MAX_STEPS, circular_ref, is_circular
from kvrelay.router.request import Kind, parse

NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}

LOOP = {"$ref": "#/$defs/n/properties/a"}
NESTED = {"type": "object", "properties": {"b": {"$ref": "#/properties/a/properties/b"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"oneOf": [{"$ref": "#"}]}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"a": LOOP}, "required": ["a"]}}},
        {"type": "object", "properties": {"a": {**NESTED, "required": ["b"]}}, "required": ["a"]},
    ],
    ids=json.dumps,
)
def test_a_schema_that_is_nothing_but_itself_is_found(schema: object) -> None:
    assert circular_ref(schema) is not None


@pytest.mark.parametrize(
    "schema",
    [
        None,
        True,
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"$ref": "#/$defs/absent"},
        {"$ref": "https://example.org/schema.json"},
        {"properties": {"$ref": {"type": "string"}}},
        {"allOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/node"}], "$defs": {"node": NODE}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "array"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["b", {}]},
        {"type": "object", "properties": {"a": NESTED}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#/items"}},
        {"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/1"}]},
        {"type": "string", "$defs": {"unused": {"$ref": "#/$defs/unused"}}},
        {"type": "object", "default": {"$ref": "#/default"}},
        {"enum": [{"$ref": "#/enum"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ],
    ids=json.dumps,
)
def test_a_schema_that_an_answer_can_meet_is_let_through(schema: object) -> None:
    assert circular_ref(schema) is None


@pytest.mark.parametrize(
    ("grammar", "circular"),
    [
        ("root ::= root", True),
        ('root ::= root "x"', True),
        ('root ::= a\na ::= b "x"\nb ::= a', True),
        ("  root ::=\n    a\n a ::= root", True),
        ('root ::= "x" root', False),
        ('root ::= root | "x"', False),
        ('root ::= a? root "x"\na ::= "y"', False),
        ('root ::= a "x"\na ::= "y"\nb ::= b', False),
        ("root ::= [a-z]+", False),
        ("root ::= rooted\nrooted ::= [a-z]", False),
        ('root ::= root\nroot ::= "x"', False),
        ("start: start", False),
        ("", False),
    ],
)
def test_a_grammar_that_begins_with_itself_alone_is_found(grammar: str, circular: bool) -> None:
    assert is_circular(grammar) is circular


def test_of_a_great_many_references_only_the_first_ones_are_followed() -> None:
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(MAX_STEPS - 1)}
    chain[f"a{MAX_STEPS - 1}"] = {"$ref": "#/$defs/a0"}
    assert circular_ref({"$ref": "#/$defs/a0", "$defs": chain}) is not None
    chain[f"a{MAX_STEPS - 1}"] = {"$ref": "#/$defs/last"}
    assert circular_ref({"$ref": "#/$defs/a0", "$defs": {**chain, "last": {"$ref": "#/$defs/last"}}}) is None


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("structured_outputs", {"json": {"$ref": "#"}}),
        ("structured_outputs", {"json": '{"$ref": "#"}'}),
        ("structured_outputs", {"grammar": "root ::= root"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}),
    ],
)
def test_a_client_is_told_where_it_asks_for_what_no_answer_can_meet(param: str, value: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="no answer can match") as told:
        parse(Kind.COMPLETION, json.dumps({"prompt": "x", param: value}).encode())
    assert (told.value.status, told.value.param) == (400, param)


@pytest.mark.parametrize("value", [{"json": "no JSON"}, {"json": 5}, {"grammar": 5}, [], "x", {"choice": ["a"]}])
def test_what_is_wrong_in_another_way_is_for_the_worker_to_refuse(value: object) -> None:
    data = json.dumps({"prompt": "x", "structured_outputs": value, "response_format": value}).encode()
    assert parse(Kind.COMPLETION, data).body["structured_outputs"] == value
