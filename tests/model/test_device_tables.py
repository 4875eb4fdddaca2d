"""Block tables on a device are those of the sequences of the step, whatever ran before; a table
that grew sends what was added."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.cache.pool import BlockTable
from baton.engine import device_tables
from baton.engine.device_tables import DeviceTables

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
