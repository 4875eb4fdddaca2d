"""/openapi.json, and the same as a page at /docs, without scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from html import escape
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from gateway.http.connection import JSON, HttpRequest, HttpResponse
from gateway.http.openapi import STATUSES, openapi
from gateway.http.page import PAGE_HEADERS

DOCS_PATH, OPENAPI_PATH = "/docs", "/openapi.json"


class Docs:
    """Documentation pages, without user data, made on first use. Belongs to one event loop."""

    def __init__(self) -> None:
        self._made: Mapping[str, bytes] = {}

    async def send(self, request: HttpRequest, response: HttpResponse) -> None:
        """Send the document or the page, by the request's path."""
        if not self._made:
            self._made = await asyncio.to_thread(_make)
        response.headers += PAGE_HEADERS
        content_type = JSON if request.path == OPENAPI_PATH else "text/html; charset=utf-8"
        await response.send(HTTPStatus.OK, content_type, self._made[request.path])


def _make() -> Mapping[str, bytes]:
    document = openapi()
    return MappingProxyType(
        {OPENAPI_PATH: json.dumps(document).encode(), DOCS_PATH: "".join(_page(document)).encode()}
    )


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    info, schemas = document["info"], document["components"]["schemas"]
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>Baton: the HTTP API</title>\n'
        '<link rel="icon" href="page/icon.svg">\n'
        '<link rel="stylesheet" href="page/page.css">\n</head>\n<body class="docs">\n'
        f'<header><h1><a href="./">Baton</a></h1><p class="model">the HTTP API of '
        f"{escape(info['version'])}</p></header>\n<main>\n"
        f"<p>{_text(info['description'])} The same for programs: "
        '<a href="openapi.json">openapi.json</a>.</p>\n'
    )
    yield "<h2>Paths</h2>\n"
    yield from _table(
        ("Path", "What it does"),
        (
            (f'<a href="#{_anchor(method, path)}">{method.upper()} {escape(path)}</a>', _text(what))
            for method, path, what in (
                (method, path, operation["summary"])
                for path, methods in document["paths"].items()
                for method, operation in methods.items()
            )
        ),
    )
    yield '<h2 id="errors">Errors</h2>\n<p>'
    yield _text(
        'Each is `{"error": {"message", "type", "param", "code"}}`; on Anthropic\'s paths '
        '`{"type": "error", "error": {"type", "message"}, "request_id"}`.'
    )
    yield "</p>\n"
    statuses = ((str(status), _text(when)) for status, when in STATUSES.items())
    yield from _table(("Status", "When"), statuses)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(method, path, operation, schemas)
    yield "</main>\n</body>\n</html>\n"


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    key = "" if operation.get("security") != [{}] else " It wants no key."
    yield f'<h2 id="{_anchor(method, path)}">{method.upper()} {escape(path)}</h2>\n'
    types = " or ".join(operation["responses"]["200"]["content"])
    yield f"<p>{_text(operation['summary'])} Answers {escape(types)}.{key}</p>\n"
    if "requestBody" not in operation:
        return
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = schemas[name.rpartition("/")[2]]
    required, fields = schema.get("required", ()), schema["properties"].items()
    yield from _table(
        ("Field", "Value", "Meaning"),
        (
            (
                f"<code>{escape(field)}</code>{', required' if field in required else ''}",
                _text(kind_of(of_field)),
                _text(of_field["description"]),
            )
            for field, of_field in fields
            if of_field.get("not") != {}
        ),
    )
    refused = [f"<code>{escape(f)}</code>" for f, of_field in fields if of_field.get("not") == {}]
    if refused:
        yield f"<p>Refused, since nothing like them is served: {', '.join(refused)}.</p>\n"


#: Schema keys of lower and upper bounds, and the unit.
_LIMITS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " of them"),
    ("minProperties", "maxProperties", " members"),
)


def kind_of(schema: Mapping[str, Any]) -> str:
    """Type and range of a value in words."""
    if "anyOf" in schema:
        return "; or ".join(kind_of(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any value")
    words = [kind if isinstance(kind, str) else " or ".join(kind)]
    words += [text for low, high, unit in _LIMITS if (text := _range(schema, low, high, unit))]
    if schema.get("items"):
        words.append(f"each: {kind_of(schema['items'])}")
    if isinstance(schema.get("additionalProperties"), Mapping):
        words.append(f"each: {kind_of(schema['additionalProperties'])}")
    if "properties" in schema:
        members = (
            f"`{name}`: {kind_of(each)}{'. ' + text if (text := each.get('description')) else ''}"
            for name, each in schema["properties"].items()
        )
        words.append(f"of {'; '.join(members)}")
    return ", ".join(words)


def _range(schema: Mapping[str, Any], low: str, high: str, unit: str) -> str:
    """A range in words; empty if there is none."""
    if low in schema and high in schema:
        return f"{schema[low]:,} to {schema[high]:,}{unit}"
    if low in schema:
        return f"{schema[low]:,} or more{unit}"
    above = f"above {schema['exclusiveMinimum']:,}, " if f"exclusive{low.title()}" in schema else ""
    return f"{above}at most {schema[high]:,}{unit}" if high in schema else ""


def _anchor(method: str, path: str) -> str:
    return f"{method}{path}".translate(str.maketrans("/{}", "---"))


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield '<div class="scroll" tabindex="0" role="region" aria-label="' + heads[0] + 's">'
    yield "<table><thead><tr>"
    yield from (f'<th scope="col">{head}</th>' for head in heads)
    yield "</tr></thead><tbody>\n"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n"
    yield "</tbody></table></div>\n"


def _text(text: str) -> str:
    """Escape prose, with code between backquotes."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
