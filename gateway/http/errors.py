"""Errors in OpenAI's form: status, body, the client's own name of the field, and when to retry."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError

from baton.errors import (
    BatonError,
    Cancelled,
    ClientStalled,
    DeadlineExceeded,
    Draining,
    EngineFault,
    FieldViolation,
    HandoffFailed,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    PeerMismatch,
    PermissionDenied,
    Unauthenticated,
    WorkerLost,
)
from baton.v1 import inference_pb2
from gateway.intake.rules import MAX_SHOWN, shown

#: nginx's status for a client that disconnected; appears only in logs and metrics.
CLIENT_CLOSED_REQUEST = 499

_MAX_NUMBER_CHARS = 40

_INVALID, _SERVER = "invalid_request_error", "server_error"


@dataclass(frozen=True, slots=True)
class _Kind:
    """HTTP status of an error class, with `type` and `code` of OpenAI's error body."""

    status: int
    type: str
    code: str | None = None


_KINDS: Mapping[type[BatonError], _Kind] = {
    InvalidRequest: _Kind(HTTPStatus.BAD_REQUEST, _INVALID),
    ModelNotFound: _Kind(HTTPStatus.NOT_FOUND, _INVALID, "model_not_found"),
    Unauthenticated: _Kind(HTTPStatus.UNAUTHORIZED, _INVALID, "invalid_api_key"),
    PermissionDenied: _Kind(HTTPStatus.FORBIDDEN, _INVALID),
    Overloaded: _Kind(HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded"),
    NoWorkers: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, _SERVER),
    WorkerLost: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, _SERVER),
    HandoffFailed: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, _SERVER),
    Draining: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, _SERVER),
    DeadlineExceeded: _Kind(HTTPStatus.REQUEST_TIMEOUT, "timeout_error"),
    ClientStalled: _Kind(CLIENT_CLOSED_REQUEST, _INVALID),
    Cancelled: _Kind(CLIENT_CLOSED_REQUEST, _INVALID),
    PeerMismatch: _Kind(HTTPStatus.INTERNAL_SERVER_ERROR, _SERVER),
    EngineFault: _Kind(HTTPStatus.INTERNAL_SERVER_ERROR, _SERVER),
}

#: Error types of failures outside Baton's error classes.
_STATUS_TYPES: Mapping[int, str] = {
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.SERVICE_UNAVAILABLE: _SERVER,
    HTTPStatus.INTERNAL_SERVER_ERROR: _SERVER,
}

#: Maps the path of a field in a message, or in a derived chat body, to the client's name.
FieldNames = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Fills:
    """Annotates a body's field with the path it fills in the GenerateRequest or ChatBody.
    Violations at that path are reported under the field's own name.

    path: "[]" stands for any index. at: subfield that fills it, with the same index. when:
    predicate of values that fill it.
    """

    path: str
    at: str = ""
    when: Callable[[Any], bool] | None = None


@functools.cache
def _marks(cls: type[BaseModel]) -> tuple[tuple[str, Fills], ...]:
    """(field name, mark) pairs in order of definition."""
    return tuple(
        (name, mark)
        for name, info in cls.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, Fills)
    )


def fillers_of(path: str, body: BaseModel) -> list[str]:
    """Fields that are set and fill `path`."""
    return [name for name, mark in _filled(body) if mark.path == path]


def _filled(body: BaseModel) -> Iterator[tuple[str, Fills]]:
    """Marks of the fields that are set."""
    for name, mark in _marks(type(body)):
        value = getattr(body, name)
        if value is not None and (mark.when is None or mark.when(value)):
            yield name, mark


def names_in(body: BaseModel, moved: Mapping[str, str] | None = None) -> FieldNames:
    """Map paths to the names of the body's fields that fill them; the longest matching path wins.
    Sampling options keep their names. moved: further names by path."""

    def name_of(field: str) -> str:
        longest, name = 0, field.removeprefix("sampling.")
        names = [*(moved or {}).items(), *((m.path, n + m.at) for n, m in _filled(body))]
        for path, given in names:
            pattern = re.escape(path).replace(r"\[\]", r"(\[\d+\])")
            found = re.match(rf"{pattern}(?=[.\[]|\Z)", field)
            if found and found.end() > longest:
                longest = found.end()
                index = found[1] if found.re.groups else ""
                name = given.replace("[]", index) + field[longest:]
        return name

    return name_of


@contextmanager
def in_words_of(names: FieldNames) -> Iterator[None]:
    """Rename the fields of violations raised within to the client's names."""
    try:
        yield
    except InvalidRequest as error:
        if not error.violations:
            raise
        violations = (FieldViolation(names(v.field), v.description) for v in error.violations)
        made = InvalidRequest.of(*violations)
        made.request_id = error.request_id
        raise made from None


@dataclass(eq=False)
class HttpError(Exception):
    """An error as an HTTP answer. headers: added to those of every answer."""

    status: int
    body: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...] = ()
    request_id: str = ""

    @property
    def json(self) -> bytes:
        return json.dumps(self.body).encode()


def invalid(field: str, fault: str) -> InvalidRequest:
    """The error for one wrong field."""
    return InvalidRequest.of(FieldViolation(field, fault))


def http_error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> HttpError:
    """An error of HTTP itself, independent of the request's content."""
    kind = _STATUS_TYPES.get(status, _INVALID)
    return HttpError(status, _body(message, kind, param, code), headers)


def from_baton(error: BatonError) -> HttpError:
    """Convert an error that already has the client's field names."""
    kind = _KINDS[type(error)]
    message, param = error.message, None
    if isinstance(error, InvalidRequest) and error.violations:
        message = "; ".join(f"{v.field}: {v.description}" for v in error.violations)
        param = error.violations[0].field
    elif isinstance(error, ModelNotFound):
        param = "model"
    headers: tuple[tuple[str, str], ...] = ()
    if error.retry_after_s is not None:
        headers = (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)
    if isinstance(error, Unauthenticated):
        headers = (("www-authenticate", "Bearer"),)
    body = _body(message, kind.type, param, kind.code)
    return HttpError(kind.status, body, headers, error.request_id)


def from_validation(error: ValidationError) -> InvalidRequest:
    """Convert pydantic's errors, each field with its path and value."""
    violations = [
        FieldViolation(_path(entry["loc"]), _described(entry["type"], entry["msg"], entry["input"]))
        for entry in error.errors(include_url=False, include_context=False)[:MAX_SHOWN]
    ]
    return InvalidRequest.of(*violations)


def _path(location: tuple[int | str, ...]) -> str:
    """Format ("messages", 2, "role") as messages[2].role."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".") or "body"


def _described(kind: str, message: str, value: object) -> str:
    if kind == "json_invalid":
        return f"is not JSON: {message.removeprefix('Invalid JSON: ')}"
    if kind == "missing":
        return "is missing; give it"
    return f"{shown_value(value)}: {message[:1].lower()}{message[1:]}"


def shown_value(value: object) -> str:
    """A client's value for an error message: shortened, in JSON's spelling."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, inference_pb2.TokenIds):
        return f"a list of {len(value.ids)}"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    return text[:_MAX_NUMBER_CHARS]


def _body(message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
