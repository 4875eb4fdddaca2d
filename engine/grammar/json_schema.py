"""Narrows JSON Schemas where the grammar library allows more than a reader takes: fractions without
end, and dates that no calendar has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Maximum digits behind the point of a number with bounds. The library takes up to 10.
MAX_FRACTION_DIGITS = 9

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

#: Keywords whose values are schemas, lists of schemas, and schemas by name.
_ONE = ("items", "additionalProperties", "contains")
_PARTS = ("allOf", "anyOf", "oneOf")
_LIST = (*_PARTS, "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
#: The library knows the lengths of months other than February. RFC 3339 has the year 0000, readers
#: such as Python's datetime do not.
_DATE = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"


def narrowed(schema: Any, *, is_fixed: bool = False) -> Any:
    """A schema whose documents all satisfy `schema`. schema: of any type, since it comes from a
    request; booleans and wrong types are returned as they are. is_fixed: whether the schema that
    it is a part of has single numbers only; see _is_fixed."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    is_fixed = is_fixed or _is_fixed(schema)
    fixed_parts = {
        key for key in _PARTS if isinstance(made.get(key), list) and any(map(_is_fixed, made[key]))
    }
    for key in _ONE:
        if isinstance(made.get(key), Mapping):
            made[key] = narrowed(made[key])
    for key in _LIST:
        if isinstance(made.get(key), list):
            fixed = (is_fixed and key in _PARTS) or (key == "allOf" and key in fixed_parts)
            made[key] = [narrowed(each, is_fixed=fixed) for each in made[key]]
    for key in _NAMED:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: narrowed(each) for name, each in made[key].items()}
    more: dict[str, Any] = {}
    is_open = not (is_fixed or fixed_parts or made.get("type") == "integer")
    if is_open and "multipleOf" not in made and _has_short_bounds(made):
        more["multipleOf"] = 10.0**-MAX_FRACTION_DIGITS
    if made.get("format") in ("date", "date-time"):
        more["pattern"] = _DATE
    return _with_all(made, more) if more else made


def _is_fixed(schema: Any) -> bool:
    """Whether it may take single numbers only, which end by themselves: of 0.5 alone the library
    finds no multiple: its range ends at 0.499999999."""
    if not isinstance(schema, Mapping):
        return False
    listed = schema.get("enum")
    values = [*(listed if isinstance(listed, list) else ()), schema.get("const")]
    is_one = "minimum" in schema and schema["minimum"] == schema.get("maximum")
    return "$ref" in schema or is_one or any(isinstance(value, int | float) for value in values)


def _has_short_bounds(schema: Mapping[str, Any]) -> bool:
    """Whether it bounds numbers, and leaves room for the permitted digits between its bounds."""
    bounds = [schema[name] for name in _BOUNDS if isinstance(schema.get(name), int | float)]
    return bool(bounds) and all(round(b, MAX_FRACTION_DIGITS - 1) == b for b in bounds)


def _with_all(schema: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with more keywords, which stand in `allOf` where it has one of its own."""
    if not more.keys() & schema.keys():
        return {**schema, **more}
    every = schema.get("allOf", [])
    return {**schema, "allOf": [*every, more]} if isinstance(every, list) else schema
