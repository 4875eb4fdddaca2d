"""A body's JSON: within limits, and read in pieces where it is long, with others' turns between
them.

What is made of objects, lists and numbers takes far more time and memory than their text, so that
they are counted before any is made. Long lists of token ids, of which a prompt may have a million,
are read apart from the rest, each straight into a message, and as many as no model here takes are
not read at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from pydantic_core import from_json

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.http.errors import shown_value
from gateway.http.long_json import Received, outlines, read_long_json
from gateway.intake.rules import MAX_SHOWN
from gateway.long_work import LONG_PIECE, Pacer, let_others_run

#: Of a body, nested ones too: objects and lists, members of objects, and values, long lists of
#: token ids apart. Counted by their marks.
MAX_NODES = 2**16
MAX_MEMBERS = 2**16
MAX_VALUES = 2**18

#: At the top of a body, unknown ones among them.
MAX_FIELDS = 256

MAX_PROMPTS = 128

#: Bytes from which on a list of numbers is read apart; and of one that are read in one go.
_LONG_LIST_BYTES = 4096
_LIST_PIECE_BYTES = 2**18

#: Bytes from which on what remains of a body is read in pieces: less takes the library no more than
#: ten milliseconds, and it says where a fault is.
_LONG_REST_BYTES = 2**20

_OF_NUMBERS = b"+-.0123456789Ee, \t\r\n"

#: Where a long list of numbers is in a body, its brackets included.
_Span: TypeAlias = tuple[int, int]


async def read_fields(
    data: Received, id_fields: Sequence[str], max_model_len: int
) -> dict[str, Any]:
    """A body's fields. id_fields: those that may be a list of token ids, or a list of such lists; a
    long one is a TokenIds. max_model_len: of the model, in tokens. Raises InvalidRequest."""
    if len(data) < LONG_PIECE:  # too short for too many of anything
        return _fields_of(data)
    spans, num_values = await _scanned(data)
    mark = secrets.token_hex(8)  # no client knows which
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
        cut = {name: cut[name] for name, *_ in places}  # the others are no prompts
    _check_lengths(
        {field: _num_values(data, cut[name]) for name, field, *_ in places}, max_model_len
    )
    pacer = Pacer()
    for name, field, container, key in places:
        container[key] = await _token_ids(field, data, cut[name], pacer)
    return fields


def wrong_ids(field: str, values: Sequence[Any], first: int = 0) -> InvalidRequest:
    """Of values that are not all token ids. first: the index of the first of them in their
    field."""
    wrong = ((i, v) for i, v in enumerate(values) if type(v) is not int or not 0 <= v < 2**32)
    return InvalidRequest.of(
        *(
            FieldViolation(f"{field}[{first + i}]", f"{shown_value(value)}: must be a token id")
            for i, value in islice(wrong, MAX_SHOWN)
        )
    )


async def _rest_of(data: Received, *, has_all: bool) -> dict[str, Any]:
    """A body's fields. has_all: long lists among them."""
    if len(data) < _LONG_REST_BYTES:
        return _fields_of(data, has_all=has_all)
    try:
        fields = await read_long_json(data)
    except ValueError as error:
        raise _wrong(f"is not JSON: {error}") from None
    return _checked(fields)


def _fields_of(data: Received, *, has_all: bool = True) -> dict[str, Any]:
    """has_all: whether long lists are among them, so that a fault is where the library says."""
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
    """Long lists of numbers, and how many values there are in all. Raises InvalidRequest."""
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
    """Of numbers. opened, closed: where its brackets are."""
    if closed - opened < _LONG_LIST_BYTES:
        return False
    inner = data[opened + 1 : closed]
    return not inner.translate(None, _OF_NUMBERS) and not inner.isspace()


def _num_values(data: Received, span: _Span) -> int:
    return data.count(b",", *span) + 1


def _without(data: Received, cut: Mapping[str, _Span]) -> Received:
    """A body with names in place of its long lists."""
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
    """Names that are where token ids may be: each with its field's path, what it is in, and under
    which key."""
    for field in id_fields:
        value = fields.get(field)
        if isinstance(value, str) and value in cut:
            yield value, field, fields, field
        elif isinstance(value, list):
            for index, each in enumerate(value[:MAX_PROMPTS]):
                if isinstance(each, str) and each in cut:
                    yield each, f"{field}[{index}]", value, index


def _check_lengths(lengths: Mapping[str, int], max_model_len: int) -> None:
    """lengths: of each field, in token ids."""
    for field, length in lengths.items():
        if length > max_model_len:
            fault = f"{length} token ids: the model takes {max_model_len}; send fewer"
            raise InvalidRequest.of(FieldViolation(field, fault))
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
            ids = from_json(b"[0," + data[at:until] + b"]")[1:]  # a piece of nothing is none
        except ValueError as error:
            why = str(error).partition(" at line ")[0]
            fault = f"is not JSON behind its first {num_before} values: {why}"
            raise InvalidRequest.of(FieldViolation(field, fault)) from None
        try:
            made.ids.extend(ids)
        except (TypeError, ValueError):
            raise wrong_ids(field, ids, num_before) from None
        await pacer.advance(until - at)
        at = until + 1
    return made


def _wrong(fault: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation("body", fault))
