"""Parses JSON bodies within limits, long ones in pieces so that other tasks run in between.

Objects, lists and numbers take far more time and memory parsed than as text, so their counts are
checked before parsing. Long lists of token ids (prompts of up to a million) are parsed separately,
straight into a message, and not at all if no model here could take them.

Other long JSON gives the same result as one call of pydantic_core.from_json, errors included. That
library takes tens of milliseconds for 16 MB of escapes, non-ASCII text or long numbers. Long lists
and objects are therefore parsed a few members at a time, and long strings in parts.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import islice
from typing import Any, TypeAlias

from pydantic_core import from_json

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.http.errors import invalid, shown_value
from gateway.intake.rules import MAX_SHOWN
from gateway.long_work import LONG_PIECE, Pacer, let_others_run

#: Maxima per body, nested values included: objects and lists, object members, and values without
#: long lists of token ids. Counted by their punctuation.
MAX_NODES = 2**16
MAX_MEMBERS = 2**16
MAX_VALUES = 2**18

#: Maximum top-level fields, unknown ones included.
MAX_FIELDS = 256

MAX_PROMPTS = 128

#: Field with which a prompt may be longer than the model takes.
_TRUNCATION = "truncate_prompt_tokens"

#: Minimum bytes of a list of numbers that is parsed separately, and bytes parsed at once.
_LONG_LIST_BYTES = 4096
_LIST_PIECE_BYTES = 2**18

#: Bytes of remaining JSON above which it is parsed in pieces. Below, the library takes at most ten
#: milliseconds and reports the position of an error.
_LONG_REST_BYTES = 2**20

_OF_NUMBERS = b"+-.0123456789Ee, \t\r\n"

#: Byte range of a long list of numbers, brackets included.
_Span: TypeAlias = tuple[int, int]


async def read_fields(
    data: Received, id_fields: Sequence[str], max_model_len: int
) -> dict[str, Any]:
    """Parse a body.

    id_fields: fields that may be a list of token ids, or a list of such lists; long ones become
    TokenIds. max_model_len: in tokens. Raises InvalidRequest.
    """
    if len(data) < LONG_PIECE:  # too short to exceed a count
        return _fields_of(data)
    spans, num_values = await _scanned(data)
    mark = secrets.token_hex(8)  # unguessable by clients
    cut = {f"{mark}-{index}": span for index, span in enumerate(spans)}
    while True:
        num_left = num_values - sum(_num_values(data, span) for span in cut.values())
        if num_left > MAX_VALUES:
            raise _wrong(f"{num_left} values; send at most {MAX_VALUES} beside token ids")
        await let_others_run(len(data))
        fields = await _rest_of(_without(data, cut), has_all=not cut)
        places = [*_places(fields, id_fields, cut)]
        if len(places) == len(cut):
            break
        cut = {name: cut[name] for name, *_ in places}  # the others are not prompts
    lengths = {field: _num_values(data, cut[name]) for name, field, *_ in places}
    _check_lengths(lengths, max_model_len, are_cut=fields.get(_TRUNCATION) is not None)
    pacer = Pacer()
    for name, field, container, key in places:
        container[key] = await _token_ids(field, data, cut[name], pacer)
    return fields


def wrong_ids(field: str, values: Sequence[Any], first: int = 0) -> InvalidRequest:
    """The error for values that are not all token ids. first: index of values[0] in the field."""
    wrong = ((i, v) for i, v in enumerate(values) if type(v) is not int or not 0 <= v < 2**32)
    return InvalidRequest.of(
        *(
            FieldViolation(f"{field}[{first + i}]", f"{shown_value(value)}: must be a token id")
            for i, value in islice(wrong, MAX_SHOWN)
        )
    )


async def _rest_of(data: Received, *, has_all: bool) -> dict[str, Any]:
    """Parse the remaining fields. has_all: whether long lists are included."""
    if len(data) < _LONG_REST_BYTES:
        return _fields_of(data, has_all=has_all)
    try:
        fields = await read_long_json(data)
    except ValueError as error:
        raise _wrong(f"is not JSON: {error}") from None
    return _checked(fields)


def _fields_of(data: Received, *, has_all: bool = True) -> dict[str, Any]:
    """Parse the fields. has_all: whether long lists are included, so that the library's error
    position is right."""
    try:
        fields = from_json(data, cache_strings=False)
    except ValueError as error:
        why = str(error) if has_all else str(error).partition(" at line ")[0]
        raise _wrong(f"is not JSON: {why}") from None
    return _checked(fields)


def _checked(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise _wrong(f"{shown_value(fields)}: must be an object")
    if len(fields) > MAX_FIELDS:
        raise _wrong(f"{len(fields)} fields; give at most {MAX_FIELDS}")
    return fields


async def _scanned(data: Received) -> tuple[list[_Span], int]:
    """Spans of long lists of numbers, and the total number of values. Raises InvalidRequest."""
    spans: list[_Span] = []
    num_nodes = num_members = num_values = 0
    opened = -1
    async for begin, outline in outlines(data):
        num_nodes += outline.count(b"{") + outline.count(b"[")
        num_members += outline.count(b":")
        num_values += outline.count(b",")
        if num_nodes > MAX_NODES:
            raise _wrong(f"more than {MAX_NODES} objects and lists; send fewer")
        if num_members > MAX_MEMBERS:
            raise _wrong(f"more than {MAX_MEMBERS} members of objects; send fewer")
        at = 0
        while (end := outline.find(b"]", at)) >= 0:
            start = outline.rfind(b"[", at, end)
            opened = begin + start if start >= 0 else opened
            if opened >= 0 and _is_long_list(data, opened, begin + end):
                spans.append((opened, begin + end + 1))
            opened, at = -1, end + 1
        start = outline.rfind(b"[", at)
        opened = begin + start if start >= 0 else opened
    return spans, num_values


def _is_long_list(data: Received, opened: int, closed: int) -> bool:
    """Whether the list between two brackets is long and numeric. opened, closed: positions of the
    brackets."""
    if closed - opened < _LONG_LIST_BYTES:
        return False
    inner = data[opened + 1 : closed]
    return not inner.translate(None, _OF_NUMBERS) and not inner.isspace()


def _num_values(data: Received, span: _Span) -> int:
    return data.count(b",", *span) + 1


def _without(data: Received, cut: Mapping[str, _Span]) -> Received:
    """The body with placeholder strings for its long lists."""
    if not cut:
        return data
    parts: list[Received] = []
    at = 0
    for name, (begin, end) in cut.items():
        parts += (data[at:begin], b'"%b"' % name.encode())
        at = end
    parts.append(data[at:])
    return b"".join(parts)


def _places(
    fields: dict[str, Any], id_fields: Sequence[str], cut: Mapping[str, _Span]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Placeholders where token ids are allowed: (name, field path, container, key)."""
    for field in id_fields:
        value = fields.get(field)
        if isinstance(value, str) and value in cut:
            yield value, field, fields, field
        elif isinstance(value, list):
            for index, each in enumerate(value[:MAX_PROMPTS]):
                if isinstance(each, str) and each in cut:
                    yield each, f"{field}[{index}]", value, index


def _check_lengths(lengths: Mapping[str, int], max_model_len: int, *, are_cut: bool) -> None:
    """lengths: token ids by field. are_cut: whether some of a longer prompt are kept."""
    for field, length in lengths.items():
        if length > max_model_len and not are_cut:
            raise invalid(field, f"{length} token ids: the model takes {max_model_len}; send fewer")
    if (total := sum(lengths.values())) > MAX_VALUES + max_model_len:
        raise _wrong(f"{total} token ids; send at most {MAX_VALUES + max_model_len} in all")


async def _token_ids(
    field: str, data: Received, span: _Span, pacer: Pacer
) -> inference_pb2.TokenIds:
    made = inference_pb2.TokenIds()
    at, end = span[0] + 1, span[1] - 1
    while at <= end:
        comma = data.find(b",", min(at + _LIST_PIECE_BYTES, end), end)
        until = comma if comma >= 0 else end
        num_before = len(made.ids)
        try:
            ids = from_json(b"[0," + data[at:until] + b"]")[1:]  # an empty piece parses as nothing
        except ValueError as error:
            why = str(error).partition(" at line ")[0]
            fault = f"is not JSON behind its first {num_before} values: {why}"
            raise invalid(field, fault) from None
        try:
            made.ids.extend(ids)
        except (TypeError, ValueError):
            raise wrong_ids(field, ids, num_before) from None
        await pacer.advance(until - at)
        at = until + 1
    return made


def _wrong(fault: str) -> InvalidRequest:
    return invalid("body", fault)


#: A body as received by a connection.
Received: TypeAlias = bytes | bytearray

#: Maximum nesting, as the library's; the innermost containers are empty.
MAX_DEPTH = 200

#: Bytes parsed at once: a few milliseconds.
PIECE_BYTES = 2**18

#: Lower bound of the bytes scanned in the time that one quote takes.
_BYTES_A_MARK = 8

#: Bytes of an outline scanned for punctuation at once.
_MARKED_BYTES = 2**13

_MARKS = re.compile(rb"[][{},:]")
_SPACES = b" \t\r\n"
_LEADING_SPACES = re.compile(rb"[ \t\r\n]*")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")

#: Bytes of a surrogate pair, escaped.
_PAIR_BYTES = len(r"\ud83d\ude00")

#: Longest character in UTF-8, in bytes.
_CHARACTER_BYTES = 4


async def read_long_json(data: Received, piece_bytes: int = PIECE_BYTES) -> Any:
    """Parse `data`. Raises ValueError, without a position."""
    reader = _Reader(data, await _long_containers(data, piece_bytes), piece_bytes)
    try:
        return await reader.value(0, len(data))
    except ValueError as error:
        raise ValueError(str(error).partition(" at line ")[0]) from None


async def outlines(data: Received) -> AsyncIterator[tuple[int, bytes]]:
    """The JSON with strings blanked, in pieces with their offsets; other tasks run between
    pieces."""
    begin, is_text, pacer = 0, False, Pacer()
    while begin < len(data):
        piece = data[begin : begin + LONG_PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1] or piece  # do not split an escape
        outline, num_texts = _outline(piece, is_text=is_text)
        is_text ^= num_texts % 2 == 1
        await pacer.advance(len(piece) // _BYTES_A_MARK + num_texts)
        yield begin, outline
        begin += len(piece)


def _outline(piece: Received, *, is_text: bool) -> tuple[bytes, int]:
    """Blank the strings of a piece, and count its quotes. is_text: whether it begins inside a
    string."""
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    parts: list[Received] = [*piece.split(b'"')]
    for index in range(0 if is_text else 1, len(parts), 2):
        parts[index] = b" " * len(parts[index])
    return b" ".join(parts), len(parts) - 1


@dataclass(slots=True)
class _Container:
    """A list or object. begin: offset of its opening bracket; end: offset after the closing one.
    commas, colons: its own, without those of nested containers."""

    begin: int
    is_object: bool
    end: int = 0
    commas: list[int] = dataclass_field(default_factory=list)
    colons: list[int] = dataclass_field(default_factory=list)


async def _long_containers(  # noqa: PLR0912, one arm per mark
    data: Received, piece_bytes: int
) -> dict[int, _Container]:
    """Containers of at least `piece_bytes` bytes, by offset. Raises ValueError for unbalanced
    brackets."""
    found: dict[int, _Container] = {}
    opened: list[_Container] = []
    pacer = Pacer()
    async for begin, outline in outlines(data):
        for first in range(0, len(outline), _MARKED_BYTES):
            num_marks = 0
            for match in _MARKS.finditer(outline, first, first + _MARKED_BYTES):
                mark, at = match[0], begin + match.start()
                num_marks += 1
                if mark in b"[{":
                    if len(opened) > MAX_DEPTH:
                        raise ValueError("recursion limit exceeded")
                    opened.append(_Container(at, mark == b"{"))
                elif not opened:
                    raise ValueError("trailing characters")
                elif mark == b",":
                    opened[-1].commas.append(at)
                elif mark == b":":
                    opened[-1].colons.append(at)
                else:
                    closed = opened.pop()
                    closed.end = at + 1
                    if closed.is_object != (mark == b"}"):
                        raise ValueError("expected `,` or `]`, or `,` or `}`")
                    if len(opened) == MAX_DEPTH and data[closed.begin + 1 : at].strip(_SPACES):
                        raise ValueError("recursion limit exceeded")
                    if closed.end - closed.begin >= piece_bytes:
                        found[closed.begin] = closed
            await pacer.advance(_BYTES_A_MARK * num_marks)
    if opened:
        raise ValueError(f"EOF while parsing {'an object' if opened[-1].is_object else 'a list'}")
    return found


class _Reader:
    """Parses values of `data` within offsets, ignoring surrounding space. containers: all of at
    least piece_bytes."""

    def __init__(
        self, data: Received, containers: Mapping[int, _Container], piece_bytes: int
    ) -> None:
        self._data = data
        self._containers = containers
        self._piece_bytes = piece_bytes
        self._pacer = Pacer()
        self._no_key = secrets.token_hex(8)  # unguessable by clients

    async def value(self, begin: int, end: int) -> Any:
        begin, end = self._trimmed(begin, end)
        if end - begin < self._piece_bytes:
            return await self._read(b"%b", begin, end)
        if self._data[begin] == ord('"'):
            return await self._text(begin, end)
        container = self._containers.get(begin)
        if container is None:
            return await self._read(b"%b", begin, end)
        if container.end != end:
            raise ValueError("trailing characters")
        return await (self._object if container.is_object else self._list)(container)

    async def _list(self, container: _Container) -> list[Any]:
        values: list[Any] = []
        for begin, end in self._members(container):
            if end - begin >= self._piece_bytes:
                values.append(await self.value(begin, end))
            else:  # after a value, so that a superfluous comma is an error
                values += (await self._read(b"[0,%b]", begin, end))[1:]
        return values

    async def _object(self, container: _Container) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        colons, no_key = container.colons, self._no_key
        for begin, end in self._members(container):
            if end - begin >= self._piece_bytes:
                index = bisect_left(colons, begin)
                colon = colons[index] if index < len(colons) else end
                if colon >= end:
                    raise ValueError("expected `:`")
                key = await self.value(begin, colon)
                if not isinstance(key, str):
                    raise ValueError("key must be a string")
                fields[key] = await self.value(colon + 1, end)
            else:
                of_piece = await self._read(b'{"' + no_key.encode() + b'":0,%b}', begin, end)
                del of_piece[no_key]
                fields |= of_piece
        return fields

    def _members(self, container: _Container) -> Iterator[tuple[int, int]]:
        """Offsets of a container's members: groups of about one piece, or one longer member. Empty
        for a blank container."""
        bounds = [container.begin, *container.commas, container.end - 1]
        if len(bounds) == 2:
            begin, end = self._trimmed(container.begin + 1, container.end - 1)
            if begin == end:
                return
        index = 0
        while index < len(bounds) - 1:
            last = bisect_right(bounds, bounds[index] + self._piece_bytes) - 1
            last = max(last, index + 1)
            yield bounds[index] + 1, bounds[last]
            index = last

    async def _text(self, begin: int, end: int) -> str:
        data, last = self._data, end - 1
        if data[last] != ord('"'):
            raise ValueError("EOF while parsing a string")
        parts: list[str] = []
        at = begin + 1
        while at < last:
            cut = _cut(data, at, at + self._piece_bytes, last)
            parts.append(await self._read(b'"%b"', at, cut))
            at = cut
        return "".join(parts)

    async def _read(self, form: bytes, begin: int, end: int) -> Any:
        """Parse the range between two offsets, inserted into `form`."""
        await self._pacer.advance(end - begin)
        return from_json(form % self._data[begin:end], cache_strings=False)

    def _trimmed(self, begin: int, end: int) -> tuple[int, int]:
        """The range without surrounding space."""
        found = _LEADING_SPACES.match(self._data, begin, end)
        begin = found.end() if found else begin
        while begin < end:
            tail = self._data[max(begin, end - LONG_PIECE) : end]
            num_spaces = len(tail) - len(tail.rstrip(_SPACES))
            end -= num_spaces
            if num_spaces < len(tail):
                break
        return begin, end


def _cut(data: Received, begin: int, near: int, end: int) -> int:
    """An offset near `near` where a string can be split: not inside a character, an escape or a
    surrogate pair. begin: start of a character before `near`; end: end of the string."""
    if near >= end:
        return end
    escape = data.rfind(b"\\", max(begin, near - _PAIR_BYTES), near)
    if escape < 0:
        first = near - _CHARACTER_BYTES
        starts = (at for at in range(near, first, -1) if data[at] & 0xC0 != 0x80)
        return max(begin + 1, next(starts, near))
    before = data[begin : escape + 1]
    if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
        return escape + 1  # inside an escape
    if data[escape + 1] != ord("u"):
        return min(escape + 2, end)
    is_high = _HIGH_SURROGATE.match(data, escape) and data.startswith(b"\\u", escape + 6)
    return min(escape + (_PAIR_BYTES if is_high else 6), end)
