"""A conversation with a call of a tool, kept to by a grammar, and its answer, by frameworks that
people use, unmodified, against `baton serve`."""

from __future__ import annotations

import pytest

from tests.http_clients.conftest import HERE, Run, runner

pytestmark = pytest.mark.slow


@pytest.fixture
def run(environment: str) -> Run:
    return runner(environment)


@pytest.mark.parametrize(
    ("name", "environment"),
    [("langchain", "frameworks"), ("litellm", "frameworks"), ("open_webui", "open-webui")],
)
def test_a_conversation_with_a_call_of_a_tool(
    name: str, run: Run, request: pytest.FixtureRequest
) -> None:
    """The server, of a wider scope, would be started first, also where the frameworks are not."""
    base_url = request.getfixturevalue("base_url")
    run("python", HERE / f"{name}_conversation.py", f"{base_url}/v1")
