"""Schemas are narrowed to what readers take: fractions end, and dates are in a calendar."""

from __future__ import annotations

import datetime
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import Grammar
from engine.grammar.json_schema import MAX_FRACTION_DIGITS, narrowed
from tests.support.grammar_walks import (
    END,
    ids_of,
    matcher_of,
    small_text,
    small_vocabulary,
    walk,
)


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether a document of the schema may be `text`, byte by byte."""
    matcher = matcher_of(Grammar.json_schema(schema), small_vocabulary())
    for byte in text.encode():
        if byte not in ids_of(matcher.allowed()):
            return False
        matcher.advance(byte)
    return matcher.is_over or END in ids_of(matcher.allowed())


@given(
    st.integers(-(10**6), 10**6).map(lambda n: n / 1000),
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_a_bounded_number_keeps_its_bound_and_has_few_digits(
    bound: float, keyword: str, is_reference: bool, seed: int
) -> None:
    number: dict[str, Any] = {"type": ["number", "null"], keyword: bound}
    schema: dict[str, Any] = {"items": number}
    if is_reference:
        schema = {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": number}}
    schema |= {"type": "array", "minItems": 3, "maxItems": 3}
    matcher = matcher_of(Grammar.json_schema(schema), small_vocabulary())
    text = small_text(walk(matcher, random.Random(seed)))
    for value in filter(None, json.loads(text, parse_float=str, parse_int=str)):
        assert len(value.partition(".")[2]) <= MAX_FRACTION_DIGITS
        assert {
            "minimum": float(value) >= bound,
            "maximum": float(value) <= bound,
            "exclusiveMinimum": float(value) > bound,
            "exclusiveMaximum": float(value) < bound,
        }[keyword]


def test_all_permitted_digits_can_be_written() -> None:
    schema = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    assert takes(schema, "0.123456789")
    assert not takes(schema, "0.1234567891")
    assert takes({**schema, "exclusiveMaximum": 0.01}, "0.009999999")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "integer", "minimum": 0},
        {"type": "number", "minimum": 1e-12, "maximum": 2e-12},
        {"type": "number", "minimum": 0, "multipleOf": 0.25},
        {"type": "number", "minimum": 4, "maximum": 4},
        {"minimum": 0, "const": 0.5},
        {"enum": [{"minimum": 0, "format": "date"}]},
        {"properties": {"format": {"const": "date"}, "minimum": {"type": "string"}}},
        {"items": True, "allOf": "no list"},
        "no schema",
    ],
)
def test_what_needs_no_narrowing_stays(schema: Any) -> None:
    assert narrowed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": 0.5, "maximum": 0.5},
        {"minimum": 0, "enum": [0.25, 0.5]},
        {"minimum": 0, "anyOf": [{"enum": [0.5]}, {"const": 1.5}]},
        {"const": 0.5, "anyOf": [{"minimum": 0}, {"maximum": -1}]},
        {"allOf": [{"type": "number", "minimum": 0}, {"enum": [0.5]}]},
        {"minimum": 0, "$ref": "#/$defs/x", "$defs": {"x": {"const": 0.5}}},
    ],
)
def test_single_numbers_can_be_written(schema: dict[str, Any]) -> None:
    """The library finds no multiple of a fraction in a range of one number."""
    assert takes(schema, "0.5")


def test_a_number_beside_single_ones_of_other_places_has_few_digits() -> None:
    number = {"type": "number", "minimum": 0}
    for schema in (
        {"anyOf": [number, {"enum": [7]}]},
        {"anyOf": [{"const": "none"}, number]},
        {"anyOf": [number, {"$ref": "#/$defs/x"}], "$defs": {"x": {"const": 0.5}}},
    ):
        assert not takes(schema, "0.1234567891")


@pytest.mark.parametrize("suffix", ["", "T01:02:03Z"])
@pytest.mark.parametrize("own", [{}, {"pattern": "^[0-9]"}])
def test_dates_are_those_of_the_calendar(suffix: str, own: dict[str, str]) -> None:
    schema = {"type": "string", "format": "date-time" if suffix else "date", **own}
    days = [f"{y:04}-02-{d}" for y in (0, 1, 4, 1900, 2000, 2023, 2024) for d in (28, 29, 30)]
    for day in (*days, "0000-01-01", "2024-04-31", "2024-12-31", "2024-00-01"):
        try:
            datetime.date.fromisoformat(day)
            is_one = True
        except ValueError:
            is_one = False
        assert takes(schema, f'"{day}{suffix}"') == is_one, day


def test_a_value_above_zero_is_above_zero_when_read() -> None:
    schema = {"type": "number", "exclusiveMinimum": 0}
    assert not takes(schema, f"0.{'0' * 400}1")  # read as 0.0
    assert not takes(schema, "0")
    assert takes(schema, "0.000000001")
