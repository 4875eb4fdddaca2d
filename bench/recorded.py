"""Recorded loads: when requests came, how long they were, and which prefixes they shared. No text,
no token ids."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

#: Prompt tokens that one entry of hash_ids stands for.
HASH_BLOCK_TOKENS = 512

_CSV_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request. hash_ids: names of its prompt's blocks of `block_tokens` tokens each, the last
    one maybe not full; two prompts that begin with the same names begin with the same tokens. Empty
    if nothing is known of them."""

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = HASH_BLOCK_TOKENS


class TraceError(ValueError):
    """A file is no trace, or a line of it is not as the format says."""


def read_trace(path: Path, limit: int | None = None) -> tuple[TraceEntry, ...]:
    """The first `limit` requests of a file, in order of arrival; times begin at the file's own
    zero.

    The name tells the format. .csv: columns TIMESTAMP (date and time), ContextTokens,
    GeneratedTokens. .jsonl: one object per line with timestamp (ms), input_length, output_length,
    and hash_ids. Raises TraceError; OSError.
    """
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix)
    if reader is None:
        raise TraceError(f"{path}: give a .csv or a .jsonl file")
    with path.open(encoding="utf-8", newline="") as lines:
        entries = tuple(islice(_checked(path, reader(path, lines)), limit))
    if not entries:
        raise TraceError(f"{path}: there is no request in it")
    return tuple(sorted(entries, key=lambda entry: entry.arrival_s))


def scaled(entry: TraceEntry, input_scale: float, output_scale: float) -> TraceEntry:
    """The request with its lengths multiplied, each at least 1; blocks shrink as the prompt
    does, so that what was shared of a prompt is the same share of it. Raises ValueError for
    scales <= 0."""
    if not (input_scale > 0 and output_scale > 0):
        raise ValueError("scales of lengths must be more than 0")
    return replace(
        entry,
        num_input_tokens=max(1, round(entry.num_input_tokens * input_scale)),
        num_output_tokens=max(1, round(entry.num_output_tokens * output_scale)),
        block_tokens=max(1, round(entry.block_tokens * input_scale)),
    )


def capped(entry: TraceEntry, max_model_len: int) -> TraceEntry:
    """The request cut to what a model takes: the output to half of its length, the prompt to what
    is left then.

    Raises ValueError for max_model_len < 2.
    """
    if max_model_len < 2:
        raise ValueError(f"max_model_len {max_model_len}: give at least 2")
    num_output = min(entry.num_output_tokens, max_model_len // 2)
    num_input = min(entry.num_input_tokens, max_model_len - num_output)
    return replace(entry, num_input_tokens=num_input, num_output_tokens=num_output)


def _read_csv(path: Path, lines: Iterable[str]) -> Iterator[TraceEntry]:
    rows = csv.DictReader(lines)
    if not set(rows.fieldnames or ()) >= _CSV_COLUMNS:
        raise TraceError(f"{path}: it lacks one of the columns {', '.join(sorted(_CSV_COLUMNS))}")
    for row in rows:
        arrival_s = _seconds(row["TIMESTAMP"])
        yield TraceEntry(arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _read_jsonl(path: Path, lines: Iterable[str]) -> Iterator[TraceEntry]:
    del path
    for line in lines:
        if line.strip():
            told = json.loads(line)
            yield TraceEntry(
                told["timestamp"] / 1000,
                int(told["input_length"]),
                int(told["output_length"]),
                tuple(int(name) for name in told.get("hash_ids", ())),
            )


def _checked(path: Path, entries: Iterator[TraceEntry]) -> Iterator[TraceEntry]:
    """The entries, with TraceError for what a reader cannot read and for lengths that no request
    has."""
    number = 0
    while True:
        number += 1
        try:
            entry = next(entries, None)
        except TraceError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{path}: request {number} is not as its format says: {error!r}"
            ) from None
        if entry is None:
            return
        if entry.num_input_tokens < 1 or entry.num_output_tokens < 1:
            raise TraceError(f"{path}: request {number} has a length below 1")
        yield entry


def _seconds(text: str) -> float:
    """A date and time with up to seven decimals, as seconds; without a zone it is UTC."""
    moment = datetime.fromisoformat(text[:26])
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
