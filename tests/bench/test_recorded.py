"""Trace files: both formats are read, lengths are scaled and cut, and what is no trace is
refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workload import fitted
from engine.plan.trace import TraceEntry, TraceError, read_trace

ENTRIES = st.builds(
    TraceEntry,
    st.just(0.0),
    st.integers(1, 200_000),
    st.integers(1, 20_000),
)
SCALES = st.floats(0.001, 10)


def test_the_table_of_azure_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert (first.num_input_tokens, first.num_output_tokens, first.hash_ids) == (374, 44, ())
    assert (second.num_input_tokens, second.num_output_tokens) == (396, 109)
    assert second.arrival_s - first.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert read_trace(path, 1) == (first,)


def test_the_lines_of_mooncake_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 40, "input_length": 1000, "output_length": 3, "hash_ids": [7, 9]},
        {"timestamp": 1040, "input_length": 513, "output_length": 5, "hash_ids": [7, 8]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    assert read_trace(path) == (
        TraceEntry(0.04, 1000, 3, (7, 9), 512),
        TraceEntry(1.04, 513, 5, (7, 8), 512),
    )


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.txt", "", "give a .csv or a .jsonl"),
        ("a.csv", "", "lacks one of the columns"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n",
            "request 1",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,0\n", "below 1"),
        ("a.jsonl", "{", "request 1"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5}', "request 1"),
        ("a.jsonl", "[]", "request 1"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=told):
        read_trace(path)


@given(ENTRIES, SCALES, SCALES, st.integers(2, 100_000))
def test_what_is_sent_fits_the_model_and_is_never_empty(
    entry: TraceEntry, input_scale: float, output_scale: float, max_model_len: int
) -> None:
    bigger = fitted(entry, input_scale, output_scale, 1 << 60)
    assert abs(bigger.num_input_tokens - entry.num_input_tokens * input_scale) <= 1
    assert abs(bigger.num_output_tokens - entry.num_output_tokens * output_scale) <= 1
    fit = fitted(entry, input_scale, output_scale, max_model_len)
    assert 1 <= fit.num_input_tokens <= bigger.num_input_tokens
    assert 1 <= fit.num_output_tokens <= bigger.num_output_tokens
    assert fit.num_input_tokens + fit.num_output_tokens <= max_model_len
    if bigger.num_input_tokens + bigger.num_output_tokens <= max_model_len:
        assert fit.num_input_tokens == bigger.num_input_tokens
