"""`baton check --against`: a right server holds, and each fault is found by its check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.check.against.answer import assemble
from baton.check.against.checks import CHECKS, run_check
from baton.check.against.server import Server
from baton.check.against.trial import Finding, Trial
from baton.cli.check_against import check_against
from tests.support.scripted_openai import scripted_server


def findings_of(url: str) -> dict[str, Finding]:
    trial = Trial(Server(f"{url}/v1"), num_requests=4, concurrency=4, seed=3)
    return {check.name: run_check(check, trial) for check in CHECKS}


@pytest.mark.slow
def test_a_right_server_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server() as server:
        assert check_against(server.url, None, None, num_requests=4, seed=1) == 0
    rows = capsys.readouterr().out.splitlines()
    assert sum("held for" in row for row in rows) == len(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("lost", "stream"),
        ("doubled", "stream"),
        ("late", "stream"),
        ("unended", "chat"),
        ("usage", "usage"),
        ("load", "greedy"),
        ("load", "seeded"),
        ("cancel", "cancels"),
        ("cache", "cache"),
        ("choices", "n"),
        ("logprob", "logprobs"),
        ("canary", "canaries"),
    ],
)
def test_each_fault_is_found(fault: str, name: str) -> None:
    with scripted_server(fault) as server:
        findings = findings_of(server.url)
    assert findings[name].failures
    if fault in ("choices", "logprob", "canary"):
        assert [each for each, finding in findings.items() if finding.failures] == [name]


def test_a_failure_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server("usage") as server:
        assert check_against(server.url, "scripted", "key", num_requests=3, seed=1) == 1
    printed = capsys.readouterr().out
    assert "The first, asked alone: 34 tokens for max_tokens 32" in printed
    assert f"curl {server.url}/v1/completions" in printed


def test_an_error_leaves_a_check_untried() -> None:
    with scripted_server() as server:
        trial = Trial(Server(server.url), num_requests=2, concurrency=2, seed=1)
    finding = run_check(CHECKS[0], trial)
    assert (finding.has_held, finding.failures) == (False, ())
    assert server.url in finding.untried


def piece(**choice: Any) -> str:
    return json.dumps({"choices": [choice]})


def test_what_a_stream_must_not_do() -> None:
    end = piece(index=0, text="b", finish_reason="stop")
    right = [piece(index=0, text="a"), end, "[DONE]"]
    assert assemble(right).faults == ()
    assert assemble(right).texts == ("ab",)
    assert assemble([*right, end]).faults[0] == "something came after the stream's end"
    assert assemble(right[:1]).faults == ("choice 0 has no end", "the stream has no [DONE]")
    assert assemble(right[:1], is_cut=True).faults == ()
    assert assemble([piece(index=1, text="", finish_reason="stop"), "[DONE]"]).faults
    assert "an error within" in assemble([json.dumps({"error": "x"}), *right]).faults[0]
