"""Runs vLLM's own tests of its HTTP API against Baton, and writes their outcomes beside this file:
python -m tests.http_clients.vllm_suite.run [FILE_OR_TEST]...

tests/http_clients/setup.sh fetches the tests (vllm.txt, .vllm/). A test that fails must have its
reason in reasons.py; the page docs/openai.md has both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
CLIENTS = HERE.parent
TESTS = CLIENTS / ".vllm"
OUTCOMES = HERE / "outcomes.json"

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


def run(names: Sequence[str]) -> Mapping[str, str]:
    """Outcome, passed, failed or skipped, of each test."""
    from tests.http_clients.vllm_suite.model import make_model

    with tempfile.TemporaryDirectory() as made:
        folder, report = make_model(Path(made) / "model"), Path(made) / "report.xml"
        command = Path(made) / "vllm"
        serve = f'exec "{sys.executable}" -W ignore "{HERE / "serve.py"}" "$@"'
        command.write_text(f"#!/bin/sh\n{serve}\n")
        command.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{made}:{os.environ['PATH']}",
            "PYTHONPATH": str(HERE),
            "SCRIPTED_MODEL": str(folder),
            "VLLM_TESTS": str(TESTS),
        }
        python = CLIENTS / ".venv-vllm" / "bin" / "python"
        options = ("-q", "-p", "plugin", "-p", "no:cacheprovider", f"--junitxml={report}")
        asked = [f"tests/entrypoints/{name}" for name in names or FILES]
        subprocess.run(
            [python, "-m", "pytest", *options, *asked], cwd=TESTS, env=environment, check=False
        )
        return dict(_outcomes(report))


def _outcomes(report: Path) -> Sequence[tuple[str, str]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        place = (case.get("classname") or "").removeprefix("tests.entrypoints.").replace(".", "/")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        found.append((f"{place}::{case.get('name')}", "skipped" if "skipped" in kinds else outcome))
    return found


def main() -> int:
    """Run, and keep the outcomes; those of named tests beside what is known of the others."""
    from tests.http_clients.vllm_suite.reasons import reason_of

    names = sys.argv[1:]
    outcomes = run(names)
    known = json.loads(OUTCOMES.read_text()) if names and OUTCOMES.is_file() else {}
    OUTCOMES.write_text(json.dumps({**known, **outcomes}, indent=1, sort_keys=True) + "\n")
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    unexplained = [test for test in failed if reason_of(test) is None]
    num_passed = sum(outcome == "passed" for outcome in outcomes.values())
    print(f"{num_passed} of {num_passed + len(failed)} passed, {len(unexplained)} without a reason")
    print("\n".join(unexplained))
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
