"""llama.cpp's tests of its server, against one that runs (DEBUG_EXTERNAL)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from tests.http_clients.scripted_server import scripted_server
from tests.http_clients.suite import (
    DECISION,
    HERE,
    MODEL,
    Outcomes,
    Reason,
    Suite,
    run_pytest,
)

TESTS = HERE / ".llama_cpp"

#: Those of paths of OpenAI's and Anthropic's APIs, and of what every server has.
FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_compat_oai_responses.py",
    "test_completion.py",
    "test_tokenize.py",
)


#: llama-server answers to every name.
_NAMES = ("test", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4", "gpt-4.1", "davinci-002")


def _run(tests: Sequence[str]) -> Outcomes:
    names = ",".join(f"{name}=tinyllama-2" for name in _NAMES)
    options = ("--served-model-name=tinyllama-2", f"--served-model-aliases={names}")
    with tempfile.TemporaryDirectory() as made, scripted_server(*options) as url:
        environment = {
            "DEBUG_EXTERNAL": "1",
            "PORT": url.rpartition(":")[2],
            "REPORT": f"{made}/report.xml",
            "PYTHONPATH": str(TESTS),
        }
        asked = [f"unit/{name}" for name in tests or FILES]
        found = run_pytest("llama_cpp", TESTS, ["--noconftest", *asked], environment)
        return {name.removeprefix("unit/"): found[name] for name in found}


_REASONS = (
    Reason(
        "test_basic::|test_context_size_exceeded|with_reasoning_model",
        MODEL,
        "needs a server that was started with the test's own options",
    ),
    Reason(
        r"with_openai_library|cached_tokens|test_chat_completion(_stream)?\[",
        MODEL,
        "expects the words and tokens of llama.cpp's own model, or the name of its build",
    ),
    Reason(
        "test_completion::|test_tokenize::|template|return_progress|token_count|verbose|telemetry",
        DECISION,
        "llama.cpp's own paths and members: `/completion`, `/apply-template`, slots, progress",
    ),
    Reason(
        "with_grammar|test_logit_bias",
        DECISION,
        "llama.cpp's own fields: `content` of `/tokenize`, and GBNF, which is refused; "
        "`guided_grammar` takes Lark's syntax",
    ),
    Reason(
        "timings_per_token|test_logprobs_stream",
        DECISION,
        "the first piece of a stream has an empty `content`, as OpenAI's, not null",
    ),
    Reason(
        "test_invalid_chat_completion_req",
        DECISION,
        "two messages of the assistant at the end are a conversation",
    ),
    Reason(
        "image|vision",
        DECISION,
        "pictures are refused with 400, not 500",
    ),
    Reason(
        "empty_messages",
        DECISION,
        "no messages are refused with 400",
    ),
)

LLAMA_CPP = Suite(
    name="llama_cpp",
    title="llama.cpp's tests of its server",
    about=(
        "Those of chats, completions, responses, messages and tokens in llama-cpp-python 0.3.36, "
        "unmodified, with `DEBUG_EXTERNAL=1` against one server: Baton in two tiers with the "
        "scripted model, which does not say what llama.cpp's model says."
    ),
    run=_run,
    reasons=_REASONS,
    not_run="Others are of llama-server's options, slots, router, tools and embeddings.",
)
