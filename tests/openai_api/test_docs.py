"""/openapi.json and /docs: what they say is what is served."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from baton.sampling_params import OPTIONS
from gateway.http.docs import DOCS_PATH, OPENAPI_PATH
from gateway.http.openapi import openapi
from tests.openai_api.test_bad_input import BODIES, GOOD
from tests.openai_api.test_raw_http import fetch
from tests.openai_api.world import MODEL
from tests.support.http_connection import Connection
from tests.support.live_tiers import LiveSystem

#: Why a value within its limits may be refused: the model leaves less, or fields go together.
_LESS = "the model|workers run at once|goes with|more than|below n|with stream|no mark|one token"

DOCUMENT = openapi()
SCHEMAS: dict[str, dict[str, Any]] = DOCUMENT["components"]["schemas"]


def properties(path: str) -> dict[str, Any]:
    return SCHEMAS[BODIES[path].__name__]["properties"]  # type: ignore[no-any-return]


def beyond(schema: dict[str, Any]) -> list[Any]:
    """Values just outside what a field may be."""
    kind, wrong = schema.get("type"), []
    if kind in ("integer", "number"):
        if "minimum" in schema:
            wrong.append(schema["minimum"] - 1)
        if "exclusiveMinimum" in schema:
            wrong.append(schema["exclusiveMinimum"])
        if "maximum" in schema:
            wrong.append(schema["maximum"] + 1)
    elif kind == "array":
        of_each = schema.get("items", {})
        wrong += [[value] for value in beyond(of_each)]
        if "maxItems" in schema:
            some = "x" if of_each.get("type") == "string" else 5
            wrong.append([some] * (schema["maxItems"] + 1))
    elif kind == "string" and "maxLength" in schema:
        wrong.append("x" * (schema["maxLength"] + 1))
    elif kind == "object" and "maxProperties" in schema:
        wrong.append({str(i): 0 for i in range(schema["maxProperties"] + 1)})
    return wrong


def within(schema: dict[str, Any]) -> list[Any]:
    """The ends of what a number may be."""
    return [schema[end] for end in ("minimum", "maximum") if end in schema]


def test_every_field_that_is_read_is_described_and_no_other() -> None:
    for path, cls in BODIES.items():
        described = properties(path)
        assert described.keys() == {*cls.model_fields, *cls.refused}
        for name, schema in described.items():
            assert schema["description"], (path, name)
            is_limited = name in OPTIONS and OPTIONS[name].limits and name not in cls.refused
            if is_limited and schema.get("type") != "boolean":
                assert beyond(schema) or "anyOf" in schema, (path, name)
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


#: A body of SageMaker's path, which takes those of two others.
INVOKED = {"/invocations": GOOD["/v1/completions"]}


@pytest.mark.slow
def test_the_page_lists_every_case_of_the_openai_package() -> None:
    from tests.openai_api.cases import CASES

    page = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
    listed = re.sub(r"\n  +", " ", page.partition("## What is tested")[2])
    nums = {name: int(num) for name, num in re.findall(r"^### (.+) \((\d+)\)$", listed, re.M)}
    assert nums == Counter(case.section for case in CASES)
    assert re.findall(r"^- (.+)$", listed, re.M) == [
        case.name for section in nums for case in CASES if case.section == section
    ]
    assert len(CASES) >= 70


@pytest.mark.parametrize("path", BODIES)
def test_what_is_answered_follows_the_schema(path: str) -> None:
    validator = Draft202012Validator(SCHEMAS[BODIES[path].__name__])
    assert validator.is_valid(GOOD[path])
    for name in BODIES[path].refused:
        assert not validator.is_valid({**GOOD[path], name: True})


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", BODIES)
async def test_limits_are_those_that_the_server_keeps(path: str, connection: Connection) -> None:
    num_limits = 0
    for name, schema in properties(path).items():
        for value in beyond(schema):
            body = {**GOOD[path], name: value}
            answer = await connection.post(path, json.dumps(body).encode())
            assert answer.status == 400, (name, value)
            assert f"{name}" in answer.body["error"]["message"], (name, value, answer)
            num_limits += 1
        for value in within(schema):
            body = {**GOOD[path], name: value}
            answer = await connection.post(path, json.dumps(body).encode())
            if answer.status == 400:
                message = answer.body["error"]["message"]
                assert re.search(_LESS, message), (name, value, message)
    assert num_limits >= 5


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_each_path_answers_as_described(keyless: LiveSystem) -> None:
    for path, methods in DOCUMENT["paths"].items():
        for method in methods:
            asked = (GOOD | INVOKED)[path] if method == "post" else None
            response, _ = await fetch(keyless.http, path.replace("{model}", MODEL), asked)
            assert response.status == 200, path
            shown = methods[method]["responses"]["200"]["content"]
            content_type = (response.getheader("content-type") or "").partition(";")[0]
            assert path in ("/health", "/ping", "/healthcheck") or content_type in shown, path


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_is_open_and_of_this_host_alone(keyless: LiveSystem) -> None:
    response, body = await fetch(keyless.http, OPENAPI_PATH)
    assert (response.status, json.loads(body)) == (200, json.loads(json.dumps(DOCUMENT)))
    response, body = await fetch(keyless.http, DOCS_PATH)
    assert (response.getheader("content-security-policy") or "").startswith("default-src 'none'")
    page = body.decode()
    assert not re.search(r"https?://|<script|<style| style=| on[a-z]+=", page)
    for path in DOCUMENT["paths"]:
        assert f" {path}</h2>" in page
    for path in BODIES:
        for name in properties(path):
            assert f"<code>{name}</code>" in page, name
    anchors = set(re.findall(r'href="#([^"]+)"', page))
    assert anchors == set(re.findall(r'<h2 id="([^"]+)"', page)) - {"errors"}
