"""`baton generate`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.cli.generate import generate
from baton.client import (
    BeamSearch,
    ChatMessage,
    Chunk,
    SamplingParams,
    StructuredOutput,
    TimeToFirstToken,
)
from baton.errors import FieldViolation, InvalidRequest, Overloaded
from baton.types import FinishReason

if TYPE_CHECKING:
    from conftest import FakeClient

Run = Callable[..., Any]

#: Parameters that make no sense on a command line, and one that has flags for its parts.
NO_FLAG = {"logit_bias", "beam_search", "structured_output"}


def test_text_goes_to_stdout_as_it_is(run: Run, client: FakeClient) -> None:
    result = run("generate", "say")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    assert client.asked == [("say", SamplingParams(max_tokens=128))]
    assert client.address == "127.0.0.1:50051"


def test_every_sampling_parameter_has_a_flag() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - set(inspect.signature(generate).parameters) == NO_FLAG


def test_flags_reach_the_request(run: Run, client: FakeClient) -> None:
    flags = [
        "--max-tokens",
        "4",
        "--temperature",
        "0.5",
        "--stop",
        "a",
        "--stop",
        "b",
        "--seed",
        "7",
        "--ignore-eos",
    ]
    assert run("generate", "say", *flags).exit_code == 0
    (asked,) = client.asked
    assert asked[1] == SamplingParams(
        max_tokens=4, temperature=0.5, stop=["a", "b"], seed=7, ignore_eos=True
    )


def test_flags_of_a_beam_search(run: Run, client: FakeClient) -> None:
    flags = ["--beam-width", "4", "--length-penalty", "0.5", "--early-stopping", "never"]
    assert run("generate", "say", *flags).exit_code == 0
    assert client.asked[0][1].beam_search == BeamSearch(4, 0.5, "never")
    assert run("generate", "say", "--beam-width", "2").exit_code == 0
    assert client.asked[1][1].beam_search == BeamSearch(2)


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (["--json-schema", "{}"], StructuredOutput(json_schema="{}")),
        (["--json-object"], StructuredOutput(json_object=True)),
        (["--regex", "a+"], StructuredOutput(regex="a+")),
        (["--choice", "a", "--choice", "b"], StructuredOutput(choice=["a", "b"])),
        (["--grammar", "@FILE"], StructuredOutput(grammar='start: "a"')),
    ],
)
def test_flags_of_a_structured_output(
    run: Run, client: FakeClient, tmp_path: Path, flags: list[str], output: StructuredOutput
) -> None:
    (tmp_path / "file").write_text('start: "a"')
    flags = [flag.replace("FILE", str(tmp_path / "file")) for flag in flags]
    assert run("generate", "say", *flags).exit_code == 0
    assert client.asked[0][1].structured_output == output


def test_several_choices_are_printed_one_after_the_other(run: Run, client: FakeClient) -> None:
    client.script = (
        Chunk(0, (5,), "Hel", choice=0),
        Chunk(0, (7,), "Bye", choice=1, finish_reason=FinishReason.STOP, score=-0.25),
        Chunk(1, (6,), "lo", choice=0, finish_reason=FinishReason.STOP),
    )
    result = run("generate", "say", "--n", "2")
    assert result.stdout == "-- choice 0\nHello\n-- choice 1, score -0.2500\nBye\n"
    assert client.asked[0][1].n == 2


def test_json_is_one_object_with_everything(run: Run, client: FakeClient) -> None:
    client.script = client.script
    result = run("generate", "say", "--json")
    answer = json.loads(result.stdout)
    assert answer["request_id"] == "r1"
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["token_ids"] == [5, 6]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["timing"]["prefill_worker"] == "prefill-0"


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_timing_goes_to_stderr_by_tier(
    flags: tuple[str, ...], run: Run, client: FakeClient
) -> None:
    result = run("generate", "say", "--timing", *flags)
    assert client.asked
    tiers = [line.split()[0] for line in result.stderr.splitlines()]
    assert tiers == ["gateway", "prefill", "handoff", "decode", "total"]
    assert "2 KiB" in result.stderr
    assert "prefill-0" not in result.stdout or flags


def test_timing_tells_that_the_decode_worker_computed_the_prompt(
    run: Run, client: FakeClient
) -> None:
    last = client.script[-1]
    assert isinstance(last, Chunk)
    assert last.timing
    parts = TimeToFirstToken(prefill_ms=4.25)
    timing = dataclasses.replace(last.timing, prefill_worker="", prefill_ms=0.0, first_token=parts)
    client.script = (*client.script[:-1], dataclasses.replace(last, timing=timing))
    _, prefill, handoff, *_ = run("generate", "say", "--timing").stderr.splitlines()
    assert "in a step of the decode worker in 4.2 ms, on decode-0" in prefill
    assert handoff.split()[1] == "none:"


def test_a_dash_reads_stdin_and_chat_makes_a_message(run: Run, client: FakeClient) -> None:
    run("generate", "-", "--chat", stdin="from a pipe")
    (asked,) = client.asked
    assert asked[0] == [ChatMessage("user", "from a pipe")]


def test_the_address_comes_from_the_environment_too(
    run: Run, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_ADDRESS", "far:1")
    run("generate", "say")
    assert client.address == "far:1"
    run("generate", "say", "--address", "near:2")
    assert client.address == "near:2"


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest.of(FieldViolation("sampling.top_p", "2: give 0 to 1")),
        Overloaded("full", request_id="r9"),
    ],
)
def test_an_error_is_one_line_and_exit_status_1(
    error: BaseException, run: Run, client: FakeClient
) -> None:
    client.fault = error
    result = run("generate", "say")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert str(error) in result.stderr
    assert getattr(error, "request_id", "") in result.stderr


def test_an_error_midway_keeps_what_was_printed(run: Run, client: FakeClient) -> None:
    client.script = (client.script[0], Overloaded("full"))
    result = run("generate", "say")
    assert (result.exit_code, result.stdout) == (1, "Hel")
