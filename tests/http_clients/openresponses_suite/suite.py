"""Open Responses' compliance test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.http_clients.scripted_server import run_file
from tests.http_clients.suite import DECISION, Outcomes, Reason, Suite

HERE = Path(__file__).parent


def _run(tests: Sequence[str]) -> Outcomes:
    server = ("--tool-call-parser=hermes", "--reasoning-parser=qwen3")
    return run_file(HERE / "compliance.py", tests, server)


OPENRESPONSES = Suite(
    name="openresponses",
    title="Open Responses' compliance test",
    about=(
        "The project's own test is no package; so its requests are asked in our words, and each "
        "answer and event is checked by the published schema (openresponses-types 2.4.0), against "
        "Baton in two tiers with the scripted model, which thinks before it answers."
    ),
    run=_run,
    reasons=(
        Reason("test_image", DECISION, "pictures are refused: models here read text"),
        Reason(
            "test_streamed_reasoning",
            DECISION,
            "thoughts come as `response.reasoning_text.delta`, as OpenAI's and vLLM's clients know "
            "them; the schema has `response.reasoning.delta`",
        ),
    ),
)
