"""Block tables on a device are those of the sequences of the step, whatever ran before; a table
that grew sends what was added."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.types import Sampling
from baton_kernels.gpu import attention_plan, paged_attention
from bench.stub_device import StubDeviceEngine
from bench.stub_engine import BLOCK_SIZE
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.block_table import BlockTable
from engine.torch import device_tables
from engine.torch import step as torch_step
from engine.torch.device_tables import DeviceTables

WIDTH, NUM_ROWS, NUM_BLOCKS = 6, 3, 50


def held(tables: DeviceTables, begin: int, num_entries: int) -> list[int]:
    return tables.entries[begin : begin + num_entries].tolist()


@given(st.data())
def test_each_row_holds_its_table(data: st.DataObject) -> None:
    tables = DeviceTables(NUM_ROWS, WIDTH, torch.device("cpu"))
    known: list[BlockTable | list[int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=WIDTH + 2))
        change = data.draw(st.sampled_from(("new", "plain", "grow", "replace", "drop")))
        if change == "new" or not known:
            known.append(BlockTable(ids, NUM_BLOCKS))
        elif change == "plain":
            known.append(ids)
        else:
            table = data.draw(st.sampled_from(known))
            place = data.draw(st.integers(0, len(table) - 1))
            if change == "drop":
                known = [one for one in known if one is not table]
            elif change == "grow":
                table.append(ids[0])
            elif isinstance(table, BlockTable):
                table.replace(place, ids[0])
            else:
                table[place] = ids[0]
        order: list[int] = data.draw(st.permutations(range(len(known))))
        step: Sequence[Sequence[int]] = [known[i] for i in order[:NUM_ROWS]]
        begins = tables.place(step)
        assert len(set(begins)) == len(step)
        for begin, placed in zip(begins, step, strict=True):
            assert held(tables, begin, min(len(placed), WIDTH)) == list(placed[:WIDTH])


def test_only_what_is_new_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def noted(host: torch.Tensor, device: torch.device) -> torch.Tensor:  # noqa: ARG001
        sent.append(len(host) // 2)
        return host

    monkeypatch.setattr(device_tables, "to_device", noted)
    tables = DeviceTables(NUM_ROWS, WIDTH, torch.device("cpu"))
    one, two = BlockTable((7, 8, 9), NUM_BLOCKS), BlockTable((1,), NUM_BLOCKS)
    for _ in range(3):
        tables.place((one, two))
    two.extend((2, 3))
    tables.place((two, one))
    one.replace(1, 5)
    tables.place((one,))
    assert sent == [4, 2, 3]


def test_tables_of_slots_send_what_a_row_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def noted(host: torch.Tensor, device: torch.device) -> torch.Tensor:  # noqa: ARG001
        sent.append(len(host) // 2)
        return host

    monkeypatch.setattr(device_tables, "to_device", noted)
    slots = DeviceTables(NUM_ROWS, WIDTH, torch.device("cpu"), has_slots=True).slots
    assert slots
    steps = ([[3, 4], [5]], [[3, 4, 6], [5]], [[0, 4, 6], [7]], [[7], [0, 4, 6]], [[7]])
    for tables in steps:
        placed = slots.placed([array("q", table) for table in tables])
        assert placed
        for begin, table in zip(placed.begins, tables, strict=True):
            assert slots.entries[begin : begin + len(table)].tolist() == table
    assert sent == [3, 1, 2, 4]
    assert slots.placed([[0]] * (NUM_ROWS + 1)) is None


def test_a_step_of_more_tables_than_rows_places_none() -> None:
    tables = DeviceTables(NUM_ROWS, WIDTH, torch.device("cpu"))
    assert tables.placed([[1]] * (NUM_ROWS + 1)) is None
    placed = tables.placed([[number] for number in range(NUM_ROWS)])
    assert placed
    assert [held(tables, begin, 1) for begin in placed.begins] == [[0], [1], [2]]


def test_a_step_of_a_prompt_sends_no_table_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the prompt's own nor that of what decodes beside it."""
    sent: list[int] = []
    for module in (device_tables, attention_plan, paged_attention, torch_step):
        inner = module.to_device

        def noted(
            host: torch.Tensor,
            device: torch.device,
            inner: Callable[[torch.Tensor, torch.device], torch.Tensor] = inner,
        ) -> torch.Tensor:
            sent.append(host.numel())
            return inner(host, device)

        monkeypatch.setattr(module, "to_device", noted)
    context, num_steps, num_new = 16384, 3, 64
    per_seq = -(-(context + num_new * num_steps) // BLOCK_SIZE)
    engine = StubDeviceEngine(2 * per_seq, 2, per_seq * BLOCK_SIZE, 1)
    tables = [BlockTable(range(i * per_seq, (i + 1) * per_seq), 2 * per_seq) for i in range(2)]
    for step in range(num_steps):
        slices = []
        for table, count in zip(tables, (num_new, 1), strict=True):
            row = SampleRow(count - 1, Sampling(), (), 0)
            start = context + step * count
            slices.append(SequenceSlice((0,) * count, start, table, (row,)))
        sent.clear()
        engine.forward(Batch(tuple(slices)))
    assert engine.num_eager_steps == num_steps
    # Tokens, positions and rows, and the items of attention.
    assert 3 * num_new < sum(sent) < per_seq
