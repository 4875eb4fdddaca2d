"""The compiler process: what it takes, what it refuses and why, and that a hostile grammar harms no
other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import EngineFault, InvalidRequest, Overloaded
from baton.v1 import sampling_pb2
from engine.grammar import Grammar
from gateway.intake.grammars import GrammarCompiler

FOLDER = Path(__file__).parents[3] / "models" / "baton-py-6m"


def output(**kind: Any) -> sampling_pb2.StructuredOutput:
    if "choice" in kind:
        kind["choice"] = sampling_pb2.StringList(values=kind["choice"])
    return sampling_pb2.StructuredOutput(**kind)


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(FOLDER, compile_timeout_s=300.0)
    yield made
    await made.close()


async def refusal(compiler: GrammarCompiler, **kind: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(output(**kind))
    (violation,) = caught.value.violations
    assert violation.field == f"sampling.structured_output.{next(iter(kind))}"
    assert len(violation.description) < 400
    assert "\n" not in violation.description
    return violation.description


async def test_each_kind_becomes_a_grammar(compiler: GrammarCompiler) -> None:
    schema = '{ "type": "integer",\n "minimum": 3 }'
    kinds: list[dict[str, Any]] = [
        {"json_schema": schema},
        {"json_object": True},
        {"regex": "^a+b$"},
        {"choice": ["yes", "no (really)", "né"]},
        {"grammar": 'start: "a" start | "b"'},
    ]
    grammars = [Grammar.from_bytes(await compiler.compile(output(**kind))) for kind in kinds]
    assert grammars == [
        Grammar.json_schema(json.loads(schema)),
        Grammar.json_object(),
        Grammar.regex("^a+b$"),
        Grammar.choice(["yes", "no (really)", "né"]),
        Grammar.lark('start: "a" start | "b"'),
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": "{"}, "is not JSON"),
    ({"json_schema": "[]"}, "must be a JSON object"),
    ({"json_schema": "[" * 60_000}, "nested too deep"),
    ({"json_schema": '{"type": "strange"}'}, "strange"),
    ({"json_schema": '{"not": {"const": 1}}'}, "not"),
    ({"json_schema": '{"$ref": "http://localhost/x.json"}'}, "localhost"),
    ({"json_schema": '{"$ref": "file:///etc/passwd"}'}, "retriev"),
    ({"json_schema": '{"$ref": "#"}'}, "no text matches"),
    ({"json_schema": '{"properties":{"a":' * 120 + "{}" + "}}" * 120}, "recursion"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": r"a(?=b)"}, "look-ahead"),
    ({"regex": r"[^\s\S]"}, "no text matches"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nested parentheses"),
    ({"grammar": 'begin: "a"'}, "start"),
    ({"grammar": "start: start"}, "no text matches"),
    ({"grammar": "start: nowhere"}, "nowhere"),
    ({"grammar": 'start: word "!"\nword[max_tokens=3]: /[a-z]*/'}, "max_tokens"),
    ({"grammar": 'start: word "!"\nword[stop="q"]: /[a-z]*/'}, "stop"),
    ({"grammar": "%import os.path\nstart: A"}, "os.path"),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested"),
    ({"grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40))
        + '\nA40: "x"'}, "too big"),
    ({"regex": "((a{1,100}){1,100}){1,100}"}, "costs more to follow"),
    ({"regex": "(a|aa|aaa|b)*" * 300}, "costs more to follow"),
    ({"regex": "(a*)*" * 500}, "costs more to follow"),
    ({"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20))
        + '\nr20: "x" |'}, "costs more to follow"),
]  # fmt: skip


@pytest.mark.slow
async def test_what_cannot_be_followed_is_refused_with_the_reason(
    compiler: GrammarCompiler,
) -> None:
    told = [await refusal(compiler, **kind) for kind, _ in REFUSED]
    assert [said for (_, said), text in zip(REFUSED, told, strict=True) if said not in text] == []


LARGE_COUNTS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
    {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 10**9},
    {"type": "array", "items": {"type": "array", "minItems": 10**5}, "minItems": 10**5},
    {"type": "string", "minLength": 10**9},
    {"type": "object", "minProperties": 10**9},
]


def peak_memory_mib(pid: int) -> float:
    """That a process has had in memory at any time."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
async def test_a_count_in_a_schema_costs_no_more_for_being_large() -> None:
    compiler = GrammarCompiler(FOLDER)  # with the time that a gateway gives
    try:
        await compiler.compile(output(json_schema='{"type": "array", "minItems": 3}'))
        pid = compiler.process.pid
        assert pid is not None
        before_mib = peak_memory_mib(pid)
        for schema in LARGE_COUNTS:
            await compiler.compile(output(json_schema=json.dumps(schema)))
        assert compiler.process.pid == pid
        assert peak_memory_mib(pid) < before_mib + 32
    finally:
        await compiler.close()


def chain(length: int) -> str:
    rules = "\n".join(f'r{i}: "(" r{i + 1} ")"' for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "x"'


@pytest.mark.slow
async def test_a_grammar_that_kills_the_compiler_is_refused_and_others_are_served(
    compiler: GrammarCompiler,
) -> None:
    for hostile in (
        {"grammar": chain(3000)},  # overflows the stack
        {"regex": "(a?)" * 20_000 + "a" * 20_000},  # takes gigabytes
    ):
        said, good = await asyncio.gather(
            refusal(compiler, **hostile), compiler.compile(output(regex="[0-9]+"))
        )
        assert "nested too deep" in said or "simplify" in said
        assert Grammar.from_bytes(good) == Grammar.regex("[0-9]+")
    # It is remembered, not tried again: the process that compiles this one is the one that was
    # there.
    await compiler.compile(output(regex="x"))
    pid = compiler.process.pid
    await refusal(compiler, grammar=chain(3000))
    assert compiler.process.pid == pid


async def test_a_compilation_that_does_not_end_is_killed() -> None:
    compiler = GrammarCompiler(FOLDER, compile_timeout_s=0.05)
    try:
        many = {"properties": {f"p{i}": {"type": "string"} for i in range(8000)}}
        assert "takes more than 0.05 s" in await refusal(compiler, json_schema=json.dumps(many))
    finally:
        await compiler.close()


@pytest.mark.slow
async def test_a_death_of_another_cause_fails_that_request_alone(compiler: GrammarCompiler) -> None:
    await compiler.compile(output(regex="x"))
    pid = compiler.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(compiler.compile(output(regex="y")))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFault, match="died"):
        await asked
    # Nothing was held against the grammar.
    assert Grammar.from_bytes(await compiler.compile(output(regex="y"))) == Grammar.regex("y")


@pytest.mark.slow
async def test_one_requests_cancellation_disturbs_no_other(compiler: GrammarCompiler) -> None:
    first = asyncio.create_task(compiler.compile(output(regex="z")))
    second = asyncio.create_task(compiler.compile(output(regex="z")))
    other = asyncio.create_task(compiler.compile(output(regex="w")))
    await asyncio.sleep(0)
    first.cancel()
    assert Grammar.from_bytes(await second) == Grammar.regex("z")
    assert Grammar.from_bytes(await other) == Grammar.regex("w")


@pytest.mark.slow
async def test_white_space_in_json_is_what_the_option_says() -> None:
    for most in (0, 3):
        compiler = GrammarCompiler(FOLDER, max_whitespace=most, compile_timeout_s=300.0)
        try:
            for kind in ({"json_object": True}, {"json_schema": '{"type": "object"}'}):
                grammar = Grammar.from_bytes(await compiler.compile(output(**kind)))
                assert grammar.max_whitespace == most
        finally:
            await compiler.close()


@pytest.mark.slow
async def test_a_flood_of_grammars_is_turned_away() -> None:
    compiler = GrammarCompiler(FOLDER, max_waiting=3)
    try:
        asked = [compiler.compile(output(regex=f"x{i}")) for i in range(8)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(r, Overloaded) for r in results) == 5
        assert sum(isinstance(r, bytes) for r in results) == 3
    finally:
        await compiler.close()


@pytest.mark.slow
async def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path)
    try:
        with pytest.raises(EngineFault, match=r"tokenizer\.json is gone; put"):
            await compiler.compile(output(regex="x"))
    finally:
        await compiler.close()
