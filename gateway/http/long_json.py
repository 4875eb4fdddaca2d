"""Long JSON, read in pieces with others' turns between them: the same as pydantic_core.from_json
makes of it in one go, and refused where that refuses it.

What takes that library long is not only what is made, but escapes and characters beyond ASCII in
texts, and long numbers: tens of milliseconds for 16 MB. So a long list or object is read a few
members at a time, and a long text a part at a time; what is short is the library's.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic_core import from_json

from gateway.long_work import LONG_PIECE, Pacer

#: What a connection has read.
Received: TypeAlias = bytes | bytearray

#: As many lists and objects within each other as the library takes; within these, empty ones.
MAX_DEPTH = 200

#: Bytes that are read in one go: some milliseconds.
PIECE_BYTES = 2**18

#: Bytes that are looked through in the time of one text's begin or end, at least.
_BYTES_A_MARK = 8

#: Bytes of an outline whose marks are looked at in one go.
_MARKED_BYTES = 2**13

_MARKS = re.compile(rb"[][{},:]")
_SPACES = b" \t\r\n"
_LEADING_SPACES = re.compile(rb"[ \t\r\n]*")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")

#: Bytes of two escapes that are one character.
_PAIR_BYTES = len(r"\ud83d\ude00")

#: Bytes of the longest character in UTF-8.
_CHARACTER_BYTES = 4


async def read_long_json(data: Received, piece_bytes: int = PIECE_BYTES) -> Any:
    """What `data` says. Raises ValueError, with no word of where the fault is."""
    reader = _Reader(data, await _long_containers(data, piece_bytes), piece_bytes)
    try:
        return await reader.value(0, len(data))
    except ValueError as error:
        raise ValueError(str(error).partition(" at line ")[0]) from None


async def outlines(data: Received) -> AsyncIterator[tuple[int, bytes]]:
    """JSON with spaces for its texts, in pieces, each with where it begins; others run between
    them."""
    begin, is_text, pacer = 0, False, Pacer()
    while begin < len(data):
        piece = data[begin : begin + LONG_PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1] or piece  # a backslash and what it escapes stay together
        outline, num_texts = _outline(piece, is_text=is_text)
        is_text ^= num_texts % 2 == 1
        await pacer.advance(len(piece) // _BYTES_A_MARK + num_texts)
        yield begin, outline
        begin += len(piece)


def _outline(piece: Received, *, is_text: bool) -> tuple[bytes, int]:
    """A piece with spaces for texts, and how many begin or end in it. is_text: whether it begins
    within one."""
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    parts: list[Received] = [*piece.split(b'"')]
    for index in range(0 if is_text else 1, len(parts), 2):
        parts[index] = b" " * len(parts[index])
    return b" ".join(parts), len(parts) - 1


@dataclass(slots=True)
class _Container:
    """A list or an object. begin: of its first bracket; end: behind its last one. commas, colons:
    its own, not those of what is in it."""

    begin: int
    is_object: bool
    end: int = 0
    commas: list[int] = field(default_factory=list)
    colons: list[int] = field(default_factory=list)


async def _long_containers(  # noqa: PLR0912, one arm per mark
    data: Received, piece_bytes: int
) -> dict[int, _Container]:
    """By their begins, those of so many bytes or more. Raises ValueError where brackets do not
    match."""
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
    """Reads values of `data`, which begin and end anywhere in the spaces around them. containers:
    all of piece_bytes or more."""

    def __init__(
        self, data: Received, containers: Mapping[int, _Container], piece_bytes: int
    ) -> None:
        self._data = data
        self._containers = containers
        self._piece_bytes = piece_bytes
        self._pacer = Pacer()
        self._no_key = secrets.token_hex(8)  # no client knows which

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
            else:  # behind a value, so that a comma too many is one here
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
        """Where they are: as many together, with the commas between them, as are a piece, or one
        that is longer than that by itself. None of a container of spaces."""
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
        """What the library makes of what is between two places, put into `form`."""
        await self._pacer.advance(end - begin)
        return from_json(form % self._data[begin:end], cache_strings=False)

    def _trimmed(self, begin: int, end: int) -> tuple[int, int]:
        """Without the spaces at both ends."""
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
    """Where a text may be cut near a place: between two characters, each of one escape, or of two
    that are a pair. begin: where a character begins, before that place; end: of the text."""
    if near >= end:
        return end
    escape = data.rfind(b"\\", max(begin, near - _PAIR_BYTES), near)
    if escape < 0:
        first = near - _CHARACTER_BYTES
        starts = (at for at in range(near, first, -1) if data[at] & 0xC0 != 0x80)
        return max(begin + 1, next(starts, near))
    before = data[begin : escape + 1]
    if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
        return escape + 1  # one of a backslash
    if data[escape + 1] != ord("u"):
        return min(escape + 2, end)
    is_high = _HIGH_SURROGATE.match(data, escape) and data.startswith(b"\\u", escape + 6)
    return min(escape + (_PAIR_BYTES if is_high else 6), end)
