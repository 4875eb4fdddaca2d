"""langchain-tests' ChatModelIntegrationTests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.http_clients.scripted_server import run_file
from tests.http_clients.suite import Outcomes, Suite

HERE = Path(__file__).parent


def _run(tests: Sequence[str]) -> Outcomes:
    server = ("--max-model-len=8192", "--tool-call-parser=hermes")
    # ChatOpenAI keeps its connections, so that all tests need one loop.
    scopes = [f"asyncio_default_{each}_loop_scope=session" for each in ("test", "fixture")]
    options = [f"-o{option}" for option in ("asyncio_mode=auto", *scopes)]
    return run_file(HERE / "standard.py", tests, server, options)


LANGCHAIN = Suite(
    name="langchain",
    title="LangChain's standard tests",
    about=(
        "`ChatModelIntegrationTests` of langchain-tests 1.1.9, unmodified, with ChatOpenAI of "
        "langchain-openai 1.7.3, by `/v1/chat/completions` and by `/v1/responses`, against Baton "
        "in two tiers with the scripted model."
    ),
    run=_run,
    not_run="Those of pictures, sound and PDFs are skipped: the model reads text.",
)
