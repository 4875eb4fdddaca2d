"""Structured output over live tiers: what comes out fits, in every way a sequence may go, and
hostile requests fail alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import jsonschema
import pytest

from baton.client import (
    AsyncClient,
    AsyncCompletionStream,
    BeamSearch,
    Choice,
    FinishReason,
    InvalidRequest,
    StructuredOutput,
)
from tests.support.live_tiers import (
    BOX_MODEL,
    LiveSystem,
    decode_worker,
    gateway,
    live_system,
    prefill_worker,
)

pytestmark = pytest.mark.slow

#: Oracle workers that speak with the tokens that the gateway's tokenizer knows.
TOKENS = {"model": str(BOX_MODEL), "served_model_name": "oracle"}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "béta", 3]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


@pytest.fixture
async def system() -> AsyncIterator[LiveSystem]:
    async with live_system(1, 2, worker_options=TOKENS) as made:
        yield made


def fits(choice: Choice, schema: dict[str, Any]) -> bool:
    assert choice.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(choice.text), schema)
    return True


async def test_each_kind_gives_what_it_says(system: LiveSystem) -> None:
    async def text_of(**kind: Any) -> str:
        output = StructuredOutput(**kind)
        done = await system.client.generate("x", structured_output=output, seed=3, max_tokens=900)
        assert done.finish_reason is FinishReason.STOP
        return done.text

    choices = ["yes", "yes, but", "né (*)"]
    schema, regex, choice, grammar = await asyncio.gather(
        text_of(json_schema=SCHEMA),
        text_of(regex="[a-z]{3}-[0-9]{2,4}"),
        text_of(choice=choices),
        text_of(grammar='start: "(" start ")" | /[0-9]{2}/'),
    )
    jsonschema.validate(json.loads(schema), SCHEMA)
    assert re.fullmatch("[a-z]{3}-[0-9]{2,4}", regex)
    assert choice in choices
    assert re.fullmatch(r"\(*[0-9]{2}\)*", grammar)
    assert grammar.count("(") == grammar.count(")")


async def test_any_json_object_begins_as_one(system: LiveSystem) -> None:
    output = StructuredOutput(json_object=True)
    done = await system.client.generate("x", structured_output=output, seed=1, max_tokens=60)
    assert done.text.startswith("{")
    if done.finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(done.text), dict)


async def test_every_choice_and_every_beam_fits(system: LiveSystem) -> None:
    output = StructuredOutput(json_schema=SCHEMA)
    sampled, searched = await asyncio.gather(
        system.client.generate("y", structured_output=output, n=4, seed=5, max_tokens=900),
        system.client.generate(
            "z",
            structured_output=StructuredOutput(choice=["alpha", "beta", "betas"]),
            n=2,
            beam_search=BeamSearch(3),
            max_tokens=40,
        ),
    )
    assert all(fits(choice, SCHEMA) for choice in sampled.choices)
    assert len({choice.text for choice in sampled.choices}) > 1
    assert {choice.text for choice in searched.choices} <= {"alpha", "beta", "betas"}


async def test_the_same_seed_gives_the_same_output_whatever_runs_beside_it(
    system: LiveSystem,
) -> None:
    async def one(seed: int) -> tuple[int, ...]:
        output = StructuredOutput(json_schema=SCHEMA)
        done = await system.client.generate("w", structured_output=output, seed=seed)
        return done.token_ids

    alone = await one(7)
    together = await asyncio.gather(*(one(seed) for seed in (7, 8, 7, 9, 7)))
    assert together[0] == together[2] == together[4] == alone


async def test_hostile_grammars_are_refused_and_the_others_are_served(system: LiveSystem) -> None:
    rules = "\n".join(f'r{i}: "(" r{i + 1} ")"' for i in range(3000))
    hostile = [
        StructuredOutput(grammar=f'start: r0\n{rules}\nr3000: "x"'),
        StructuredOutput(regex="((((a{1,99}){1,99}){1,99}){1,99}){1,99}b("),
        StructuredOutput(regex="a" * 8193),
        StructuredOutput(json_schema="[" * 60_000),
        StructuredOutput(json_schema='{"type": "nothing"}'),
        StructuredOutput(json_schema='{"$ref": "http://localhost:1/x"}'),
        StructuredOutput(json_schema="x" * 65_537),
        StructuredOutput(choice=[]),
        StructuredOutput(choice=["a"] * 1025),
        StructuredOutput(choice=["a", ""]),
        StructuredOutput(choice=["a" * 1000] * 70),
        StructuredOutput(grammar="start: start"),
        StructuredOutput(grammar=""),
        StructuredOutput(json_object=False),
        StructuredOutput(),
    ]

    async def refused(output: StructuredOutput) -> str:
        with pytest.raises(InvalidRequest) as caught:
            await system.client.generate("x", structured_output=output)
        (violation,) = caught.value.violations
        return violation.field

    async def served(seed: int) -> Choice:
        output = StructuredOutput(json_schema=SCHEMA)
        done = await system.client.generate("v", structured_output=output, seed=seed)
        return done.choices[0]

    good = asyncio.gather(*(served(seed) for seed in range(6)))
    fields = await asyncio.gather(*map(refused, hostile))
    assert all(field.startswith("sampling.structured_output") for field in fields)
    assert all(fits(choice, SCHEMA) for choice in await good)
    await system.until_quiet()


@pytest.mark.parametrize(
    ("beside", "field"),
    [({"ignore_eos": True}, "sampling.ignore_eos"), ({"min_tokens": 3}, "sampling.min_tokens")],
)
async def test_what_contradicts_a_grammar_is_named(
    system: LiveSystem, beside: dict[str, Any], field: str
) -> None:
    output = StructuredOutput(json_object=True)
    with pytest.raises(InvalidRequest) as caught:
        await system.client.generate("x", structured_output=output, **beside)
    assert [violation.field for violation in caught.value.violations] == [field]


async def test_an_output_goes_on_where_a_lost_worker_left_it() -> None:
    """Whichever way it goes on: the grammar's state is found again from the tokens."""
    pattern = "([a-z]{2} ){60}end"
    params: dict[str, Any] = {"structured_output": StructuredOutput(regex=pattern), "seed": 2}
    slow = {**TOKENS, "oracle_step_ms": 10.0, "drain_timeout_s": 0.2}
    async with AsyncExitStack() as stack, AsyncExitStack() as lost:
        prefill = await stack.enter_async_context(prefill_worker(**slow))
        kept = await stack.enter_async_context(decode_worker(worker_id="kept", **slow))
        going = await lost.enter_async_context(decode_worker(worker_id="going", **slow))
        address = await stack.enter_async_context(gateway([prefill], [kept, going]))
        client = await stack.enter_async_context(AsyncClient(address))
        streams = [client.stream("u", **params) for _ in range(2)]  # one on each
        outputs = [asyncio.create_task(text_of(stream)) for stream in streams]
        async with asyncio.timeout(60):
            while not all(
                w.num_running for w in (await client.model()).workers if w.tier == "decode"
            ):
                await asyncio.sleep(0.01)
        await lost.aclose()
        first, second = await asyncio.gather(*outputs)
    assert first == second
    assert re.fullmatch(pattern, first)


async def text_of(stream: AsyncCompletionStream) -> str:
    async with stream:
        return "".join([chunk.text async for chunk in stream])


async def test_a_real_model_keeps_to_a_grammar() -> None:
    model = {"engine": "torch", "model": str(BOX_MODEL), "num_threads": 1, "max_model_len": 512}
    schema = {
        "type": "object",
        "properties": {
            "function": {"enum": ["read", "write"]},
            "lines": SCHEMA["properties"]["size"],
        },
        "required": ["function", "lines"],
        "additionalProperties": False,
    }
    output = StructuredOutput(json_schema=schema)
    limits = {"num_gpu_blocks_override": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    async with live_system(
        worker_options={**model, **limits}, gateway_options={"served_model_name": None}
    ) as system:
        prompt = "def call(self):\n    return "
        drawn, greedy, searched = await asyncio.gather(
            system.client.generate(prompt, structured_output=output, n=3, seed=1, max_tokens=200),
            system.client.generate(prompt, structured_output=output, temperature=0, max_tokens=200),
            system.client.generate(
                prompt, structured_output=output, beam_search=BeamSearch(2), max_tokens=200
            ),
        )
    for choice in (*drawn.choices, *greedy.choices, *searched.choices):
        assert fits(choice, schema)
