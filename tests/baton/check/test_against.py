"""`baton check --against`: a right server holds, and each fault is found by its check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.check.against.answer import assemble
from baton.check.against.checks import CHECKS, run_check
from baton.check.against.server import Refused, Server
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
    key = " -H 'authorization: Bearer KEY'"
    assert f"curl {server.url}/v1/completions{key} -H 'content-type" in printed
    assert "Bearer key" not in printed


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "http://", "http://h:99999", "http://[::1", "http://me:secret@h"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(Refused, match="is no address of a server; give one as") as refusal:
        Server(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("part", [1, {"logprobs": {"content": [{}]}}, {"index": "first"}])
def test_an_answer_in_another_form_is_a_failure(part: object) -> None:
    with scripted_server() as server:
        trial = trial_of(server.url)
        server.document = {"choices": [part]}
        (failure,) = run_check(CHECKS[0], trial).failures
    assert "the answer has another form" in failure.what


def test_one_choice_is_expected_unless_more_are_asked_for() -> None:
    with scripted_server() as server:
        trial = trial_of(server.url)
        server.document = {"choices": [], "usage": {"total_tokens": 1}}
        failures = run_check(CHECKS[2], trial).failures
    assert {failure.what for failure in failures} == {"0 choices instead of 1"}


def trial_of(url: str) -> Trial:
    return Trial(Server(url), num_requests=2, concurrency=2, seed=1)


def test_a_server_that_is_gone_has_failed() -> None:
    with scripted_server() as server:
        trial = trial_of(server.url)
    (failure,) = run_check(CHECKS[0], trial).failures
    assert server.url in failure.what


def test_what_a_server_does_not_serve_is_not_tried() -> None:
    with scripted_server("no chats") as server:
        findings = [run_check(check, trial_of(server.url)) for check in CHECKS[:2]]
    assert [finding.has_held for finding in findings] == [True, False]
    assert (findings[1].failures, findings[1].untried) == ((), "404: not here")


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
    assert assemble(["{", *right]).faults == ("an event is no JSON: '{'",)
    assert "an error within" in assemble([json.dumps({"error": "x"}), *right]).faults[0]
