"""Recorded loads: arrivals, lengths and shared prefixes, without text or token ids."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

#: Prompt tokens per entry of hash_ids.
HASH_BLOCK_TOKENS = 512

_CSV_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request. hash_ids: names of its prompt's blocks of `block_tokens` tokens each, the last
    one possibly partial; prompts with a common prefix of names have a common prefix of tokens.
    Empty if unknown."""

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = HASH_BLOCK_TOKENS


class TraceError(ValueError):
    """A file is no trace, or has an invalid line."""


def read_trace(path: Path, limit: int | None = None) -> tuple[TraceEntry, ...]:
    """The first `limit` requests of a file, in order of arrival; times are relative to the file's
    zero.

    The suffix determines the format. .csv: columns TIMESTAMP (date and time), ContextTokens,
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
            record = json.loads(line)
            yield TraceEntry(
                record["timestamp"] / 1000,
                int(record["input_length"]),
                int(record["output_length"]),
                tuple(int(name) for name in record.get("hash_ids", ())),
            )


def _checked(path: Path, entries: Iterator[TraceEntry]) -> Iterator[TraceEntry]:
    """The entries; raises TraceError for invalid lines and lengths."""
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
