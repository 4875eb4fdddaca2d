"""The schema of forced calls."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.chat.style import ChoiceOfTools, schema_of_calls

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
}
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {"legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}}},
    "required": ["legs"],
    "$defs": {
        "Leg": {"type": "object", "properties": {"to": {"$ref": "#/$defs/City"}}},
        "City": {"enum": ["Oslo", "Rome"]},
    },
}
#: Where "$ref", "const" and "enum" are a document's, not a schema's.
ODD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "$ref": {"const": {"$ref": "#/a"}},
        "enum": {"$ref": "#/$defs/enum"},
        "default": {"enum": [{"$ref": "#"}]},
    },
    "$defs": {"enum": {"type": "integer"}},
}
SCHEMA = schema_of_calls(
    ChoiceOfTools(schemas={"trip": TRIP, "tree": TREE, "odd": ODD}, is_forced=True),
    is_parallel=True,
)


@pytest.mark.parametrize(
    ("name", "arguments", "is_valid"),
    [
        ("trip", {"legs": [{"to": "Oslo"}, {"to": "Rome"}]}, True),
        ("trip", {"legs": [{"to": "Lima"}]}, False),
        ("tree", {"value": 1, "next": {"value": 2, "next": {"value": 3}}}, True),
        ("tree", {"value": 1, "next": {"value": 2, "next": {"value": "x"}}}, False),
        ("tree", {"value": 1, "next": [{"name": "tree", "arguments": {"value": 2}}]}, False),
        ("odd", {"$ref": {"$ref": "#/a"}, "enum": 5, "default": {"$ref": "#"}}, True),
        ("odd", {"enum": "x"}, False),
        ("odd", {"$ref": {"$ref": "#/items/anyOf/2/properties/arguments/a"}}, False),
    ],
)
def test_references_stay_within_their_tool(name: str, arguments: Any, is_valid: bool) -> None:
    call = {"name": name, "arguments": arguments}
    assert Draft202012Validator(SCHEMA).is_valid([call]) == is_valid


def test_a_named_tool_has_its_own_schema() -> None:
    chosen = ChoiceOfTools(schemas={"tree": TREE}, is_forced=True, name="tree")
    assert schema_of_calls(chosen, is_parallel=True) is TREE
