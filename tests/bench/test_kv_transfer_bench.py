"""What the benchmark of the KV channel makes of its measurements; no test measures."""

from __future__ import annotations

import pytest

from bench.kv_transfer import (
    ChecksumCost,
    Cost,
    channels,
    presented_table,
    ratios,
    summary_of,
    times_table,
)
from bench.kv_ways import LAYOUT, Channel, shares_of


@pytest.mark.parametrize("num_tokens", [2, 16, 100, 2048])
@pytest.mark.parametrize("num_handoffs", [1, 4])
def test_handoffs_share_all_tokens_and_no_block_twice(num_tokens: int, num_handoffs: int) -> None:
    channel = Channel("tcp", num_handoffs=num_handoffs)
    shares = shares_of(num_tokens, channel, num_blocks=200)
    assert sum(count for count, _ in shares) == num_tokens
    assert len(shares) <= num_handoffs
    blocks = [block for _, part in shares for block in part]
    assert len(set(blocks)) == len(blocks)
    for count, part in shares:
        assert 0 < count <= LAYOUT.block_size * len(part)


def test_a_way_differs_from_the_plain_one_in_what_its_name_says() -> None:
    found = channels("folder")
    assert found["tcp TLS"].tls is not None
    assert found["tcp scattered"].tls is None
    assert found["shm secret"].secret is not None
    assert found["shm scattered"].secret is None
    assert found["tcp 4 handoffs, 2 connections"].num_connections == 2


def test_ratios_are_rates_next_to_the_roof() -> None:
    quick, slow = summary_of([Cost(1.0, 1.0)]), summary_of([Cost(2.0, 4.0)])
    names = ("memcpy", "raw tcp", "grpc.aio")
    found = {name: [quick] for name in names} | {
        "shm scattered": [slow],
        "tcp scattered": [quick],
    }
    per_byte = ChecksumCost(copied=-1.0, alone=0.5 / 1024)
    values = ratios(["1KiB"], found, per_byte)["1KiB"]
    assert values["shm scattered / memcpy"] == 0.5
    assert values["shm scattered / memcpy, CPU"] == 0.25
    assert values["shm scattered: checksum share"] == 0.0
    assert values["tcp scattered: checksum share"] == 0.5


def test_a_table_has_a_row_for_each_way_and_a_cell_for_each_size() -> None:
    summary = summary_of([Cost(1e-3, 1e-3)] * 3)
    rows = times_table(["1KiB", "1MiB"], {"way": [summary, summary]}).splitlines()
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|") == 4
    assert "1.05, 1.05 (1000)" in rows[2]


def test_a_presentation_is_timed_in_microseconds() -> None:
    summary = summary_of([Cost(1e-3, 1e-3, 2e-4)] * 3)
    found = {"shm scattered": [summary], "tcp scattered": [summary], "memcpy": [summary]}
    rows = presented_table(["64KiB"], found).splitlines()
    assert rows[2:] == ["| shm scattered | 200 |", "| tcp scattered | 200 |"]
