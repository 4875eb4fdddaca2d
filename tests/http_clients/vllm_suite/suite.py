"""vLLM's own tests of its HTTP API, fetched by tests/http_clients/setup.sh (vllm.txt, .vllm/)."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton import __version__
from tests.http_clients.suite import DECISION, MODEL, Outcomes, Reason, Suite, run_pytest

HERE = Path(__file__).parent
TESTS = HERE.parent / ".vllm"

#: Those that start a server of a model that reads and writes text.
FILES = (
    "openai/test_return_tokens_as_ids.py",
    "openai/test_return_token_ids.py",
    "openai/test_chunked_prompt.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "anthropic/test_messages.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
    "tool_parsers/test_hermes_tool_parser.py",
)


def _run(tests: Sequence[str]) -> Outcomes:
    """tests: files, or tests of them, under tests/entrypoints."""
    from tests.http_clients.vllm_suite.model import make_model  # needs tokenizers

    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made) / "model")
        command = Path(made) / "vllm"
        serve = f'exec "{sys.executable}" -W ignore "{HERE / "serve.py"}" "$@"'
        command.write_text(f"#!/bin/sh\n{serve}\n")
        command.chmod(0o755)
        environment = {
            "PATH": f"{made}:{os.environ['PATH']}",
            "PYTHONPATH": str(HERE),
            "SCRIPTED_MODEL": str(folder),
            "SERVER_VERSION": __version__,
            "VLLM_TESTS": str(TESTS),
            "REPORT": f"{made}/report.xml",
        }
        asked = [f"tests/entrypoints/{name}" for name in tests or FILES]
        outcomes = run_pytest("vllm", TESTS, ["-p", "plugin", *asked], environment)
    return {name.removeprefix("tests/entrypoints/"): outcomes[name] for name in outcomes}


_REASONS: Sequence[Reason] = (
    Reason(
        "test_long_seed|test_empty_prompt",
        DECISION,
        "refused with 400 as there, in other words",
    ),
    Reason(
        "test_check_models",
        DECISION,
        "an adapter's `root` is the model, not a path",
    ),
    Reason(
        "test_single_chat_session",
        MODEL,
        "counts tokens of another tokenizer; `prompt_tokens_details` is always there, too",
    ),
    Reason(
        "anthropic_streaming_cache_usage",
        DECISION,
        "`cache_creation_input_tokens` is 0: nobody pays for what the cache keeps",
    ),
)

VLLM = Suite(
    name="vllm",
    title="vLLM's own tests",
    about=(
        "Those of vLLM 0.33.0's tests of its HTTP API that start a server of a text model, "
        "unmodified, against Baton in two tiers with a scripted model. `vllm serve` is a shim that "
        "starts Baton; the version that a test expects is Baton's."
    ),
    run=_run,
    reasons=_REASONS,
    not_run=(
        "Not run: tests of pictures, sound and embeddings, of gpt-oss with its own tools, and of "
        "vLLM's own paths (tokens in and out, batched chats, adapters at run time, sleep, RPC)."
    ),
)
