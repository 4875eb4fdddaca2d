"""Requests: recorded loads (arrivals, lengths and shared prefixes, without text or token ids), and
requests with token ids made from lengths. Deterministic for a seed."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random

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


def fitted(
    entry: TraceEntry, input_scale: float, output_scale: float, max_model_len: int
) -> TraceEntry:
    """The request with scaled lengths, each at least 1, limited to the model's context: the output
    to half of it, the prompt to the rest. Blocks shrink with the prompt, so the shared part stays
    the same share. Raises ValueError for scales <= 0, and for max_model_len < 2."""
    if not (input_scale > 0 and output_scale > 0):
        raise ValueError("scales of lengths must be more than 0")
    if max_model_len < 2:
        raise ValueError(f"max_model_len {max_model_len}: give at least 2")
    num_output = max(1, min(round(entry.num_output_tokens * output_scale), max_model_len // 2))
    num_input = max(1, min(round(entry.num_input_tokens * input_scale), max_model_len - num_output))
    return replace(
        entry,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        block_tokens=max(1, round(entry.block_tokens * input_scale)),
    )


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


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load. due_s: send time, in seconds from the start of the load."""

    due_s: float
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


def synthetic_entries(
    num_requests: int, num_input_tokens: int, num_output_tokens: int, spread: float, rng: Random
) -> tuple[TraceEntry, ...]:
    """Requests with lengths uniform within `spread` (0..1, a share) of the means, each at least
    1."""
    if not 0 <= spread <= 1:
        raise ValueError(f"spread {spread}: give 0 to 1")

    def draw(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    return tuple(
        TraceEntry(0.0, draw(num_input_tokens), draw(num_output_tokens))
        for _ in range(num_requests)
    )


def requests_of(
    entries: Sequence[TraceEntry], due_s: Sequence[float], vocab_size: int, seed: int
) -> tuple[LoadRequest, ...]:
    """One request per entry, sent at the time of `due_s` with the same index."""
    return tuple(
        LoadRequest(due, prompt_of(entry, index, vocab_size, seed), entry.num_output_tokens)
        for index, (entry, due) in enumerate(zip(entries, due_s, strict=True))
    )


def prompt_of(entry: TraceEntry, index: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Token ids below `vocab_size`: those of its blocks, then its own (by `index`).

    They depend on nothing else, so prompts share exactly the tokens of their common hash_ids.
    """
    wanted = entry.num_input_tokens
    tokens: list[int] = []
    for name in entry.hash_ids:
        if len(tokens) >= wanted:
            break
        tokens += _tokens(f"{seed}/block/{name}", entry.block_tokens, vocab_size)
    tokens += _tokens(f"{seed}/own/{index}", max(0, wanted - len(tokens)), vocab_size)
    return tuple(islice(tokens, wanted))


def _tokens(key: str, num_tokens: int, vocab_size: int) -> list[int]:
    return Random(key).choices(range(vocab_size), k=num_tokens)
