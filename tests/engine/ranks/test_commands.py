"""What rank 0 sends is what the others read."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.ranks.commands import (
    LogitsCommand,
    StepCommand,
    StepEncoder,
    encode_logits,
    read_commands,
)

pytestmark = pytest.mark.slow

IDS = st.lists(st.integers(0, 2**40), max_size=6).map(tuple)
SLICES = st.builds(
    SequenceSlice,
    token_ids=IDS,
    start=st.integers(0, 2**40),
    block_table=IDS,
    rows=st.lists(
        st.builds(
            SampleRow,
            offset=st.integers(0, 99),
            sampling=st.just(Sampling(temperature=0.5)),
            token_ids=IDS,
            num_prompt_tokens=st.integers(0, 9),
        ),
        max_size=3,
    ).map(tuple),
    num_prompt_tokens=st.integers(0, 2**40),
)
#: Slices, each with its window's table.
PARTS = st.lists(st.tuples(SLICES, IDS), max_size=4)
STEPS = st.tuples(PARTS, st.booleans(), st.booleans()).map(lambda drawn: step_of(*drawn))
COMMANDS = st.lists(st.one_of(STEPS, IDS), max_size=5)


def step_of(
    parts: list[tuple[SequenceSlice, tuple[int, ...]]], is_apart: bool, syncs_layers: bool
) -> StepCommand:
    """is_apart: whether windowed layers have tables of their own."""
    tables = tuple(table for _, table in parts if is_apart)
    return StepCommand(Batch(tuple(part for part, _ in parts)), tables, syncs_layers)


def encode(steps: StepEncoder, command: StepCommand | tuple[int, ...]) -> bytes:
    match command:
        case StepCommand(batch, tables, syncs_layers):
            return steps.encode(batch, tables, syncs_layers=syncs_layers)
        case rows:
            return encode_logits(rows)


def plain(batch: Batch) -> list[object]:
    """What of a batch is sent."""
    return [
        (
            list(part.token_ids),
            part.start,
            list(part.block_table),
            [row.offset for row in part.rows],
            part.num_prompt_tokens,
        )
        for part in batch.slices
    ]


@given(COMMANDS)
def test_commands_arrive_as_they_were(commands: list[StepCommand | tuple[int, ...]]) -> None:
    steps = StepEncoder()
    stream = io.BytesIO(b"".join(encode(steps, command) for command in commands))
    read = list(read_commands(stream))
    assert len(read) == len(commands)
    for sent, got in zip(commands, read, strict=True):
        match sent:
            case StepCommand(batch, tables, syncs_layers):
                assert isinstance(got, StepCommand)
                assert (plain(got.batch), got.syncs_layers) == (plain(batch), syncs_layers)
                assert [tuple(table) for table in got.tables] == list(tables)
            case rows:
                assert isinstance(got, LogitsCommand)
                assert list(got.rows) == list(rows)


@given(STEPS, st.data())
def test_a_stream_that_ends_within_a_command_gives_no_part_of_it(
    step: StepCommand, data: st.DataObject
) -> None:
    steps = StepEncoder()
    whole, again = encode(steps, step), encode(steps, step)
    end = data.draw(st.integers(0, len(again) - 1))
    assert len(list(read_commands(io.BytesIO(whole + again[:end])))) == 1
