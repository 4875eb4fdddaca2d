"""Long JSON that is read in pieces means what the library makes of it in one go, and is refused
where that refuses it; no piece is long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic_core import from_json

from gateway.http import json_body
from gateway.http.json_body import MAX_DEPTH, PIECE_BYTES, read_long_json
from tests.support.virtual_loop import run_virtual

SMALLEST_PIECE = 24


def outcome(data: bytes, piece_bytes: int) -> Any:
    """What it is, or "refused"."""
    try:
        return run_virtual(read_long_json(data, piece_bytes))
    except ValueError as error:
        return f"refused: {error}"


def same_as_the_library(data: bytes, piece_bytes: int) -> bool:
    """Whether it is read, or refused, as the library does; objects in their order, too."""
    got = outcome(data, piece_bytes)
    try:
        right = from_json(data)
    except ValueError:
        return isinstance(got, str) and got.startswith("refused: ")
    return json.dumps(got) == json.dumps(right)


PIECES = st.integers(SMALLEST_PIECE, 60)
SPACES = st.sampled_from(["", "", "", " ", "\n" * 30, "\t \r"])

#: Pieces of texts, some of them invalid.
UNITS = st.sampled_from(
    [
        *("x", "xyz" * 9, "é", "\u20ac", "\U0001f600", "[", "{", ":", ",", "]", "}", " " * 20),
        *(r"\n", r"\\", r"\"", r"\/", r"\u0041", r"\u00e9", r"\ud83d\ude00", r"\uD83D\uDE00"),
    ]
)
WRONG_UNITS = st.sampled_from(
    [r"\ud83d", r"\ude00", r"\u12", r"\x", "\\", '"', "\n", "\x00", r"\uD83Dx", r"\u", "\\é"]
)
TEXTS = st.lists(UNITS, max_size=40).map("".join)
ODD_TEXTS = st.lists(UNITS | UNITS | UNITS | WRONG_UNITS, max_size=40).map("".join)
NUMBERS = st.sampled_from(["0", "-1", "1.5e3", "1" * 30, "0." + "9" * 40, "true", "null", "NaN"])
KEYS = st.sampled_from(["a", "b", r"\u0061", "a" * 30, r"\n" * 15]) | TEXTS


def quoted(text: str) -> str:
    return f'"{text}"'


@st.composite
def documents(draw: st.DrawFn, texts: st.SearchStrategy[str] = TEXTS) -> str:
    def listed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        padded = st.builds("{}{}{}".format, SPACES, inner, SPACES)
        members = st.builds("{}{}:{}".format, KEYS.map(quoted), SPACES, padded)
        return st.lists(padded, max_size=6).map(lambda each: f"[{','.join(each)}]") | st.lists(
            members, max_size=6
        ).map(lambda each: f"{{{','.join(each)}}}")

    return draw(st.recursive(texts.map(quoted) | NUMBERS, listed, max_leaves=20))


@pytest.mark.slow
@given(text=documents(), piece_bytes=PIECES)
@example('{"a":1,"bbbbbbbbbbbbbbbbbbbbbbbbb":2,"a":3}', SMALLEST_PIECE)
@example("[" + " " * 50 + "]", SMALLEST_PIECE)
@example("{" + " " * 50 + "}", SMALLEST_PIECE)
@example("  " + json.dumps("x" * 50) + "  ", SMALLEST_PIECE)
def test_what_the_library_reads_is_read_alike(text: str, piece_bytes: int) -> None:
    assert same_as_the_library(text.encode(), piece_bytes)


@pytest.mark.parametrize("character", ["é", "\u20ac", "\U0001f600"])
@pytest.mark.parametrize("num_before", range(5))
def test_no_character_is_cut(character: str, num_before: int) -> None:
    assert same_as_the_library(quoted("x" * num_before + character * 40).encode(), SMALLEST_PIECE)


@pytest.mark.slow
@given(units=ODD_TEXTS, piece_bytes=PIECES)
def test_texts_are_cut_between_characters(units: str, piece_bytes: int) -> None:
    assert same_as_the_library(quoted(units).encode(), piece_bytes)


@pytest.mark.slow
@given(
    text=documents(ODD_TEXTS),
    piece_bytes=PIECES,
    at=st.floats(0, 1),
    length=st.integers(0, 3),
    put=st.sampled_from(["", ",", ",,", "]", "[", "}", "{", ":", '"', "\\", "1 2", " x", "\xff"]),
)
@example("[" + "1," * 30 + "1]", SMALLEST_PIECE, 0.98, 1, ",")
@example('{"a":[' + "1," * 30 + "1]}", SMALLEST_PIECE, 0.98, 1, "}")
@example("[" + "1," * 30 + "1]", SMALLEST_PIECE, 1.0, 0, " x")
@example('{"' + "a" * 40 + '":1}', SMALLEST_PIECE, 0.95, 1, ",")
@example('{"' + "a" * 40 + '":1}', SMALLEST_PIECE, 0.0, 1, '{1:"')
def test_what_the_library_refuses_is_refused(
    text: str, piece_bytes: int, at: float, length: int, put: str
) -> None:
    begin = round(at * len(text))
    broken = text[:begin] + put + text[begin + length :]
    assert same_as_the_library(broken.encode("latin-1", "replace"), piece_bytes)
    assert same_as_the_library(broken.encode(), piece_bytes)


@pytest.mark.parametrize("inner", ["1", "[]", "[1]", "{}", '{"a":1}'])
@pytest.mark.parametrize("form", ["[{}]", '{{"a":{}}}'])
def test_as_deep_as_the_library(form: str, inner: str) -> None:
    opening, closing = form.format("@").split("@")
    for depth in range(MAX_DEPTH - 2, MAX_DEPTH + 3):
        data = (opening * depth + inner + closing * depth).encode()
        assert same_as_the_library(data, SMALLEST_PIECE)
        assert same_as_the_library(data, 10_000)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that the library is given in one go."""
    seen: list[int] = []

    def watched(data: bytes, **options: Any) -> Any:
        seen.append(len(data))
        return from_json(data, **options)

    monkeypatch.setattr(json_body, "from_json", watched)
    yield seen
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize("unit", [r"\n", r"\\", r"\ud83d\ude00", "é", "x" * 1000 + r"\n"])
@pytest.mark.parametrize("form", ['{"a":"%b"}', '[["%b"],1]', '{"%b":1}', '"%b"'])
def test_no_piece_of_a_text_is_long(unit: str, form: str, sizes: list[int]) -> None:
    whole = form.encode() % (unit.encode() * (3_000_000 // len(unit.encode())))
    assert run_virtual(read_long_json(whole)) == from_json(whole)
    assert max(sizes) <= PIECE_BYTES + 100


@pytest.mark.slow
def test_no_piece_of_a_list_of_long_numbers_or_texts_is_long(sizes: list[int]) -> None:
    number, text = b"1" * 4000, b'"' + b"\\n" * 500 + b'"'
    whole = b'{"a":[%b],"b":{%b}}' % (
        b",".join([number] * 500),
        b",".join(b'"%d":%b' % (index, text) for index in range(2000)),
    )
    assert run_virtual(read_long_json(whole)) == from_json(whole)
    assert max(sizes) <= PIECE_BYTES + 100
