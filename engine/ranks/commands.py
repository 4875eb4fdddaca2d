"""Commands from rank 0 to the other ranks: a kind, a count, and that many numbers, all int64 in
native byte order."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import IO

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice

_HEADER_BYTES = 16
#: Header of a slice: start, num_prompt_tokens, and the lengths of its token ids, block ids, row
#: offsets and window table, which follow.
_SLICE_NUMBERS = 6
#: Only rank 0 samples.
_UNUSED = Sampling()


class _Kind(IntEnum):
    STEP = 1
    """A batch: number of slices, the header of each slice, then each slice's numbers."""
    LAYER_SYNC_STEP = 2
    """As STEP; ranks synchronise after every layer, for `layers_done`."""
    LOGITS = 3
    """Logits of rows of the last collected step's states."""
    COLLECT = 4
    """The states of the oldest step in flight, from the last stage."""
    COPY = 5
    """Number of a pool, number of blocks, sources, targets."""


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Write the batch's KV and keep its states. Only the offsets of its sample rows are valid.
    tables: window table per slice, see WindowedStep; empty if all layers share blocks."""

    batch: Batch
    tables: Sequence[Sequence[int]]
    syncs_layers: bool


@dataclass(frozen=True, slots=True)
class CollectCommand:
    """Receive the states of the oldest step that is not collected. To the first of several
    stages."""


@dataclass(frozen=True, slots=True)
class LogitsCommand:
    """Compute logits of these rows of the last collected step's states. To the first stage."""

    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class CopyCommand:
    """Copy blocks of a pool, sources[i] to targets[i]. pool: its number among RankSpec.pools."""

    pool: int
    sources: Sequence[int]
    targets: Sequence[int]


Command = StepCommand | CollectCommand | LogitsCommand | CopyCommand


def encode_step(batch: Batch, tables: Sequence[Sequence[int]], *, syncs_layers: bool) -> bytes:
    """Encode a StepCommand. tables: empty, or one per slice."""
    numbers = array("q", [len(batch.slices)])
    parts = list(zip(batch.slices, tables or [()] * len(batch.slices), strict=True))
    for part, table in parts:
        counts = (len(part.token_ids), len(part.block_table), len(part.rows), len(table))
        numbers.extend((part.start, part.num_prompt_tokens, *counts))
    for part, table in parts:
        numbers.extend(part.token_ids)
        numbers.extend(part.block_table)
        numbers.extend(row.offset for row in part.rows)
        numbers.extend(table)
    return _frame(_Kind.LAYER_SYNC_STEP if syncs_layers else _Kind.STEP, numbers)


def encode_collect() -> bytes:
    """Encode a CollectCommand."""
    return _frame(_Kind.COLLECT, array("q"))


def encode_logits(rows: Sequence[int]) -> bytes:
    """Encode a LogitsCommand."""
    return _frame(_Kind.LOGITS, array("q", rows))


def encode_copy(pool: int, sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """Encode a CopyCommand."""
    return _frame(_Kind.COPY, array("q", [pool, len(sources), *sources, *targets]))


def _frame(kind: _Kind, numbers: array[int]) -> bytes:
    return array("q", (kind, len(numbers))).tobytes() + numbers.tobytes()


def read_commands(stream: IO[bytes]) -> Iterator[Command]:
    """Yield commands until the stream ends, also within a frame. Raises ValueError for an unknown
    kind."""
    while len(header := stream.read(_HEADER_BYTES)) == _HEADER_BYTES:
        kind, count = array("q", header)
        body = stream.read(8 * count)
        if len(body) < 8 * count:
            return
        yield _command(_Kind(kind), array("q", body))


def _command(kind: _Kind, numbers: array[int]) -> Command:
    if kind is _Kind.LOGITS:
        return LogitsCommand(numbers)
    if kind is _Kind.COLLECT:
        return CollectCommand()
    if kind is _Kind.COPY:
        pool, count = numbers[:2]
        return CopyCommand(pool, numbers[2 : 2 + count], numbers[2 + count :])
    return StepCommand(*_batch(numbers), kind is _Kind.LAYER_SYNC_STEP)


def _batch(numbers: array[int]) -> tuple[Batch, Sequence[Sequence[int]]]:
    at = 1 + numbers[0] * _SLICE_NUMBERS
    slices, tables = [], []
    for first in range(1, at, _SLICE_NUMBERS):
        start, num_prompt_tokens, *counts = numbers[first : first + _SLICE_NUMBERS]
        ends = list(accumulate(counts, initial=at))
        token_ids, block_table, offsets, table = (numbers[i:end] for i, end in pairwise(ends))
        rows = tuple(SampleRow(offset, _UNUSED, (), 0) for offset in offsets)
        slices.append(SequenceSlice(token_ids, start, block_table, rows, num_prompt_tokens))
        tables.append(table)
        at = ends[-1]
    return Batch(tuple(slices)), tables
