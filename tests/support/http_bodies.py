"""Bodies of requests, read without an event loop of the caller's."""

from __future__ import annotations

from typing import TypeVar

from gateway.http import requests
from gateway.http.json_body import read_fields
from gateway.long_work import LONG_PIECE
from tests.support.virtual_loop import run_virtual

BodyT = TypeVar("BodyT", bound=requests.Body)


async def _read(cls: type[BodyT], data: bytes) -> BodyT:
    return requests.validated(cls, await read_fields(data, cls.id_fields, 0))


def parsed(cls: type[BodyT], data: bytes) -> BodyT:
    """As format.Door.parsed."""
    reading = _read(cls, data)
    if len(data) >= LONG_PIECE:
        return run_virtual(reading)
    try:  # in one go: a loop takes longer to make than a short body to read
        reading.send(None)
    except StopIteration as done:
        body: BodyT = done.value
        return body
    raise AssertionError("a short body was read in pieces")
