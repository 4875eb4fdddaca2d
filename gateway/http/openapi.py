"""The OpenAPI document: paths, and body fields with types, ranges and meanings, generated from the
classes and tables that parse requests."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton import __version__
from baton.sampling_params import OPTIONS, Limits, Range, Texts, TokenBiases, TokenIds
from gateway.http import chat, completions, messages, responses, tokens
from gateway.http.completions import DEFAULT_MAX_TOKENS, CompletionBody
from gateway.http.connection import HttpLimits
from gateway.http.format import Route
from gateway.http.json_body import MAX_FIELDS, MAX_MEMBERS, MAX_NODES, MAX_VALUES
from gateway.http.requests import Body, ChoiceSoFar, StreamOptions
from gateway.http.responses import ResponseSoFar

#: All routes except HTML pages.
OPERATIONS = (
    completions.ROUTE,
    chat.ROUTE,
    responses.ROUTE,
    *messages.ROUTES,
    Route("/v1/models", "get", "What is served: models, their other names, their adapters."),
    Route("/v1/models/{model}", "get", "One of them."),
    *tokens.ROUTES,
    Route("/health", "get", "200 if some request could be served, else 503.", is_open=True),
    Route("/ping", "get", "The same.", is_open=True),
    Route("/healthcheck", "get", "The same.", is_open=True),
    Route("/invocations", "post", "SageMaker's path: a chat with `messages`, else a completion."),
    Route("/load", "get", "`server_load`: requests whose output is being made."),
    Route("/version", "get", "Of Baton."),
    Route("/metrics", "get", "For Prometheus.", answer="text/plain"),
)

_LIMITS = HttpLimits()

#: Meaning of each status. 499 appears only in logs and metrics.
STATUSES: Mapping[int, str] = {
    400: "A field is wrong: its path, its value and the fix are in the message, and the path of "
    "the first is `param`.",
    401: "No API key, or a wrong one.",
    404: "A model that is not served, or a path that is not.",
    405: "A path that wants another method: see `allow`.",
    408: "The request's time was over, or it was too slow to arrive.",
    413: f"A body of more than {_LIMITS.max_body_bytes >> 20} MiB.",
    429: "Full now; `retry-after` says when to try again.",
    431: f"More than {_LIMITS.max_headers} headers, or {_LIMITS.max_header_bytes >> 10} KiB "
    "of them.",
    500: "A fault of the server's; its log has the cause under the `x-request-id`.",
    503: "No worker takes work, or one was lost; `retry-after` says when to try again.",
}

_ABOUT = (
    "A field that is null is not given; one that nobody here knows is passed over, and named in a "
    "`warning` header. Keys are sent as `authorization: Bearer`, to Anthropic's paths as "
    "`x-api-key`, too. A stream that fails after its first piece has the error as its last event. "
    f"A body has at most {MAX_FIELDS} fields at its top, {MAX_NODES} objects and lists, "
    f"{MAX_MEMBERS} members of objects, and {MAX_VALUES} values beside token ids of prompts."
)

#: Fields that are sampling options under another name.
_OPTION_OF: Mapping[str, str] = {
    "stop_sequences": "stop",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}

_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    bodies = {each.body for each in OPERATIONS if each.body is not None}
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": _ERROR,
                **{
                    cls.__name__: schema_of(cls) for cls in sorted(bodies, key=lambda c: c.__name__)
                },
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(each: Route) -> dict[str, Any]:
    content: dict[str, Any] = {each.answer: {}}
    if each.make is not None:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    document: dict[str, Any] = {
        "operationId": f"{each.method}{each.path}".translate(str.maketrans("/{}", "___")),
        "summary": each.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "What went wrong.", "content": error},
        },
    }
    if each.is_open:
        document["security"] = [{}]
    if "{model}" in each.path:
        where = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        document["parameters"] = [where]
    if each.body is not None:
        schema = {"$ref": f"#/components/schemas/{each.body.__name__}"}
        document["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
        document["responses"] |= {
            str(status): {"description": when, "content": error}
            for status, when in STATUSES.items()
            if status != 405
        }
    return document


def schema_of(cls: type[Body]) -> dict[str, Any]:
    """Schema of a body. Refused fields are listed and never valid; `null` is omitted, because it
    means an absent field."""
    made = cls.model_json_schema()
    parts: Mapping[str, Any] = made.get("$defs", {})
    docs = _field_docs(cls)
    schema = _plain(made, parts)
    for name, of_field in schema["properties"].items():
        option = OPTIONS.get(_OPTION_OF.get(name, name))
        if option is not None:
            of_field.update(_limits(of_field, option.limits))
        if name in docs:
            of_field["description"] = docs[name]
        elif option is not None:
            default = DEFAULT_MAX_TOKENS if (cls, name) == (CompletionBody, "max_tokens") else None
            of_field["description"] = replace(option, limits=None).describe(default)
    for name in cls.refused:
        schema["properties"][name] = {"not": {}, "description": "Is not served here."}
    schema.pop("description", None)
    return schema


def _plain(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """pydantic's schema without titles, null alternatives and references."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        part = _plain(parts[name], parts)
        docs = _field_docs(_PARTS[name])
        for field, of_field in part["properties"].items():
            of_field["description"] = docs[field]
        return part
    options = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(options) == 1:
        return _plain(options[0], parts)
    left = ("title", "default", "$defs")
    plain = {key: value for key, value in schema.items() if key not in left}
    if "properties" in plain:
        fields = plain["properties"].items()
        plain["properties"] = {name: _plain(value, parts) for name, value in fields}
    if "items" in plain:
        plain["items"] = _plain(plain["items"], parts)
    return plain


#: Classes of nested bodies.
_PARTS: Mapping[str, type[Body]] = {
    each.__name__: each for each in (StreamOptions, ChoiceSoFar, ResponseSoFar)
}


def _limits(schema: Mapping[str, Any], limits: Limits | None) -> Mapping[str, Any]:
    """Limits of an option, if they apply to the field's type: `logprobs` of a chat is a boolean."""
    match limits, schema.get("type"):
        case Range(), "integer" | "number":
            return _range(limits)
        case Texts(max_num, max_chars), _ if "items" in schema or "anyOf" in schema:
            text = {"type": "string", "minLength": 1, "maxLength": max_chars}
            several = {"type": "array", "items": text, "maxItems": max_num}
            return several if "items" in schema else {"anyOf": [text, several]}
        case TokenIds(max_num), "array":
            return {"maxItems": max_num}
        case TokenBiases(max_num, bias), "object":
            each = {"type": "number", **_range(bias)}
            return {"maxProperties": max_num, "additionalProperties": each}
    return {}


def _range(limits: Range) -> Mapping[str, float]:
    low = "exclusiveMinimum" if limits.is_open else "minimum"
    return {low: limits.low, "maximum": limits.high}


def _field_docs(cls: type[Body]) -> Mapping[str, str]:
    """Field docstrings by name, read from the source on demand: a pydantic class that keeps them is
    slow to create."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Body):
            docs.update(_docs_of(base.__module__)[base.__name__])
    return docs


@functools.cache
def _docs_of(module: str) -> Mapping[str, Mapping[str, str]]:
    """Field docstrings of a module's classes."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    return {each.name: dict(_texts_below(each.body)) for each in classes}


def _texts_below(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str() as doc)):
                yield name, " ".join(doc.split())
