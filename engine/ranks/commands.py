"""Commands from rank 0 to the other ranks: a kind, a count, and that many numbers, all int64 in
native byte order."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import IO

import numpy as np

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.ranks.table_deltas import TableDecoder, TableEncoder

_HEADER_BYTES = 16
#: Header of a slice: start, num_prompt_tokens, and the numbers of its token ids and rows.
_SLICE_NUMBERS = 4
#: Only rank 0 samples.
_UNUSED = Sampling()


class _Kind(IntEnum):
    STEP = 1
    """A batch: number of slices, the header of each slice, token ids and row offsets of each, then
    their block tables and the windowed layers' (see table_deltas)."""
    LAYER_SYNC_STEP = 2
    """As STEP; ranks synchronise after every layer, for `layers_done`."""
    LOGITS = 3
    """Logits of rows of the last collected step's states."""
    COLLECT = 4
    """The states of the oldest step in flight, from the last stage."""
    COPY = 5
    """Number of a pool, number of blocks, sources, targets."""
    BEST = 6
    """The likeliest tokens of rows of the last collected step's states."""
    REPLAY = 7
    """As STEP, of a shape that all ranks have recorded."""


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Write the batch's KV and keep its states. Only the offsets of its sample rows are valid.
    tables: window table per slice, see WindowedStep; empty if all layers share blocks. replays:
    replay the recorded step instead, which includes the logits."""

    batch: Batch
    tables: Sequence[Sequence[int]]
    syncs_layers: bool = False
    replays: bool = False


@dataclass(frozen=True, slots=True)
class CollectCommand:
    """Receive the states of the oldest step that is not collected. To the first of several
    stages."""


@dataclass(frozen=True, slots=True)
class LogitsCommand:
    """Compute logits of these rows of the last collected step's states. To the first stage."""

    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class BestCommand:
    """Find the likeliest token of each of these rows of the last collected step's states. To the
    first stage."""

    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class CopyCommand:
    """Copy blocks of a pool, sources[i] to targets[i]. pool: its number among RankSpec.pools; that
    after the last pool's: copy slots of states."""

    pool: int
    sources: Sequence[int]
    targets: Sequence[int]


Command = StepCommand | CollectCommand | LogitsCommand | BestCommand | CopyCommand


class StepEncoder:
    """Encodes steps for ranks that read all of them, in order. tables: see table_deltas."""

    def __init__(self) -> None:
        self._blocks, self._windows = TableEncoder(), TableEncoder()

    def encode(
        self,
        batch: Batch,
        tables: Sequence[Sequence[int]],
        *,
        syncs_layers: bool = False,
        replays: bool = False,
    ) -> bytes:
        """Encode a StepCommand, of a kind that replays or one that does not. tables: empty, or one
        per slice."""
        numbers = array("q", [len(batch.slices)])
        for part in batch.slices:
            counts = (len(part.token_ids), len(part.rows))
            numbers.extend((part.start, part.num_prompt_tokens, *counts))
        for part in batch.slices:
            numbers.extend(part.token_ids)
            numbers.extend(row.offset for row in part.rows)
        numbers += self._blocks.encode([part.block_table for part in batch.slices])
        numbers += self._windows.encode(tables)
        kind = _Kind.LAYER_SYNC_STEP if syncs_layers else _Kind.STEP
        return _frame(_Kind.REPLAY if replays else kind, numbers)


def encode_collect() -> bytes:
    """Encode a CollectCommand."""
    return _frame(_Kind.COLLECT, array("q"))


def encode_logits(rows: Sequence[int]) -> bytes:
    """Encode a LogitsCommand."""
    return _frame(_Kind.LOGITS, array("q", rows))


def encode_best(rows: Sequence[int]) -> bytes:
    """Encode a BestCommand."""
    return _frame(_Kind.BEST, array("q", rows))


def encode_copy(pool: int, sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """Encode a CopyCommand."""
    return _frame(_Kind.COPY, array("q", [pool, len(sources), *sources, *targets]))


def _frame(kind: _Kind, numbers: array[int]) -> bytes:
    return array("q", (kind, len(numbers))).tobytes() + numbers.tobytes()


def read_commands(stream: IO[bytes]) -> Iterator[Command]:
    """Yield commands until the stream ends, also within a frame. Raises ValueError for an unknown
    kind."""
    steps = _StepDecoder()
    while len(header := stream.read(_HEADER_BYTES)) == _HEADER_BYTES:
        kind, count = array("q", header)
        body = stream.read(8 * count)
        if len(body) < 8 * count:
            return
        yield _command(_Kind(kind), array("q", body), steps)


def _command(kind: _Kind, numbers: array[int], steps: _StepDecoder) -> Command:
    if kind is _Kind.LOGITS:
        return LogitsCommand(numbers)
    if kind is _Kind.BEST:
        return BestCommand(numbers)
    if kind is _Kind.COLLECT:
        return CollectCommand()
    if kind is _Kind.COPY:
        pool, count = numbers[:2]
        return CopyCommand(pool, numbers[2 : 2 + count], numbers[2 + count :])
    batch, tables = steps.decode(numbers)
    return StepCommand(batch, tables, kind is _Kind.LAYER_SYNC_STEP, kind is _Kind.REPLAY)


class _StepDecoder:
    """See StepEncoder."""

    def __init__(self) -> None:
        self._blocks, self._windows = TableDecoder(), TableDecoder()

    def decode(self, numbers: array[int]) -> tuple[Batch, Sequence[Sequence[int]]]:
        at, headers = 1 + numbers[0] * _SLICE_NUMBERS, []
        for first in range(1, at, _SLICE_NUMBERS):
            start, num_prompt_tokens, num_tokens, num_rows = numbers[first : first + _SLICE_NUMBERS]
            token_ids = numbers[at : at + num_tokens]
            offsets = numbers[at + num_tokens : (at := at + num_tokens + num_rows)]
            rows = tuple(SampleRow(offset, _UNUSED, (), 0) for offset in offsets)
            headers.append((token_ids, start, rows, num_prompt_tokens))
        ids = np.frombuffer(numbers, np.int64)
        blocks, taken = self._blocks.decode(ids[at:])
        windows, _ = self._windows.decode(ids[at + taken :])
        slices = (
            SequenceSlice(token_ids, start, table, rows, num_prompt_tokens)
            for (token_ids, start, rows, num_prompt_tokens), table in zip(
                headers, blocks, strict=True
            )
        )
        return Batch(tuple(slices)), windows
