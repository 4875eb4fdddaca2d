"""The oracle engine: an engine without a model, in which lost, duplicated, moved or corrupted KV
changes the output.

The KV of a token is a hash of the prefix that ends with it, spread over layers, keys, values, heads
and dimensions. The next token is a hash of all KV visible to it (of windowed layers, KV in the
window), read from the blocks through the block table, or through the slot table of windowed layers
apart from the blocks. A model with state layers also hashes the sequence's states, each computed
from the previous states in the sequence's slot. The correct output is therefore known in advance
(`oracle_tokens`), and wrong blocks produce it only by a collision of 64-bit hashes. The hashes mix
well but are not cryptographic.
"""

from __future__ import annotations

import math
import time
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.errors import EngineFault
from baton.types import (
    FinishReason,
    KvLayout,
    NumericsClass,
    Sample,
    Sampling,
    finish_reason,
)
from engine.interface import (
    Batch,
    Engine,
    EngineSpec,
    Launched,
    LayersDone,
    SampleRow,
    SequenceSlice,
)
from engine.kv.tensors.array import ArrayKvPool
from engine.kv.tensors.grouped import GroupedKvPool
from engine.kv.tensors.state_memory import StateMemory
from engine.oracle_choice import choose, mix
from engine.ranks.mesh import stage_layers

#: Maximum sequence length, in tokens, of the reference outputs below.
REFERENCE_LEN = 4096
_ROOT = 0x9E3779B97F4A7C15
_Words = NDArray[np.uint64]

#: Shape of a sequence's states: layers, and 64-bit words per layer.
_STATE_SHAPE = (3, 15)
_STATE_WORDS = np.array(
    [mix(_ROOT - 1 - index) for index in range(math.prod(_STATE_SHAPE))], dtype=np.uint64
).reshape(_STATE_SHAPE)
"""Distinct words, so that swapped words are detected."""
_STATE_SHARES = _STATE_WORDS.copy()
"""Weights with sum 1: the weighted sum of equal words is that word."""
_STATE_SHARES[:1, :1] += np.uint64(1) - np.sum(_STATE_SHARES, dtype=np.uint64, keepdims=True)


class OracleLayers(NamedTuple):
    """Kinds of layers.

    window: tokens that windowed layers attend to, 0 if there are none. Without full layers all
    layers are windowed, and window is at least 2, because a token's KV is computed from the
    previous token's; with full layers every other one is, from the second on. has_states: whether
    there are state layers; requires full layers, and no slots for windowed ones.
    """

    window: int = 0
    has_full_layers: bool = True
    has_states: bool = False


FULL_LAYERS = OracleLayers()


def oracle_layout(layers: OracleLayers, block_size: int, num_layers: int = 4) -> KvLayout:
    """KV layout of an oracle engine, without a fingerprint."""
    first_windowed = int(layers.has_full_layers)
    windowed = range(first_windowed, num_layers, 1 + first_windowed)
    return KvLayout(
        *("", num_layers, 1, 2, "int64", block_size),
        window=layers.window,
        windowed_layers=tuple(windowed) if layers.window else (),
        num_state_layers=_STATE_SHAPE[0] if layers.has_states else 0,
        state_layer_bytes=_STATE_SHAPE[1] * 8 if layers.has_states else 0,
    )


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """layer_group_size: layers per layers_done call. step_s, token_s: wall-clock seconds of a
    forward, and of each of its new tokens; the engine sleeps for what its hashing leaves of them.

    poison_token_id: a token that fails the computation, to test fault isolation; -1: none.
    """

    num_blocks: int
    block_size: int = 16
    vocab_size: int = 1000
    max_model_len: int = 4096
    num_layers: int = 4
    layer_group_size: int = 2
    step_s: float = 0.0
    token_s: float = 0.0
    poison_token_id: int = -1
    model: str = "oracle"
    adapters: tuple[str, ...] = ()
    layers: OracleLayers = FULL_LAYERS
    num_stages: int = 1
    """Pipeline stages; 1 without a pipeline. The first one writes its layers at the launch. Each
    takes its share of the seconds of a forward."""
    num_window_slots: int = 0
    """See GroupedKvPool; 0 if blocks hold the KV of all layers."""
    num_state_slots: int = 1
    """Maximum running sequences of a model with states."""


@dataclass(frozen=True, slots=True, eq=False)
class _OracleLaunch:
    """Implements engine.interface.Launched. slot_tables: by slice, the block table in slots of the
    layers apart. end_s: time.perf_counter at which a device would finish."""

    batch: Batch
    slot_tables: tuple[Sequence[int], ...]
    layers_done: LayersDone | None
    end_s: float
    finish: Callable[[_OracleLaunch], tuple[tuple[Sample, ...], ...]]

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        return self.finish(self)


class OracleEngine(Engine):
    """Computes a launch as late as the interface allows, when its samples are requested. Blocks
    that were reassigned too early are overwritten then, which changes the output of their new
    owner."""

    def __init__(self, options: OracleOptions) -> None:
        layers = options.layers
        layout = replace(
            oracle_layout(layers, options.block_size, options.num_layers),
            fingerprint=":".join(("oracle", *sorted(options.adapters))),
        )
        self._options = options
        self._states: StateMemory | None = None
        self._kv: ArrayKvPool | GroupedKvPool[ArrayKvPool]
        if options.num_window_slots:
            self._kv = GroupedKvPool(
                layout, options.num_blocks, options.num_window_slots, ArrayKvPool
            )
        else:
            self._kv = ArrayKvPool(layout, options.num_blocks, options.num_state_slots)
            self._states = self._kv.states
        self._weights = _slot_weights(layout)
        self._stages = stage_layers(layout.num_layers, options.num_stages)
        self._ends_s = [0.0] * options.num_stages
        """time.perf_counter at which each stage has computed all launches."""
        self._launched: deque[_OracleLaunch] = deque()
        """Launches not yet computed."""
        self._drawn: tuple[Sample, ...] = ()
        """Samples of all rows of the last computed launch."""
        self._spec = EngineSpec(
            model=options.model,
            layout=layout,
            num_blocks=options.num_blocks,
            vocab_size=options.vocab_size,
            max_model_len=min(options.max_model_len, options.num_blocks * options.block_size),
            max_num_launches=1 if self._kv.groups.cannot_rewind else max(2, options.num_stages),
            is_pipelined=options.num_stages > 1,
            computes_aside=True,
            numerics=NumericsClass("oracle", dtype="int64"),
            adapters=options.adapters,
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def kv(self) -> ArrayKvPool | GroupedKvPool[ArrayKvPool]:
        return self._kv

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        """See Engine.launch. All errors are raised when the samples are requested."""
        seconds = self._options.step_s + batch.num_tokens * self._options.token_s
        end_s = time.perf_counter()
        for stage, busy_s in enumerate(self._ends_s):
            self._ends_s[stage] = end_s = max(busy_s, end_s) + seconds / len(self._ends_s)
        kv, kept = self._kv, _kept(batch)
        tables: tuple[Sequence[int], ...] = tuple(part.block_table for part in kept.slices)
        if isinstance(kv, GroupedKvPool):
            tables = tuple(
                kv.slot_table(part.block_table, part.start, part.start + len(part.token_ids))
                for part in kept.slices
            )
        launched = _OracleLaunch(kept, tables, layers_done, end_s, self._finish)
        if self._spec.is_pipelined:
            if any(part.follows is not None for part in kept.slices):
                raise EngineFault("a slice follows what another stage computes")
            self._write_all(kept.slices, tables, self._stages[0])
            self._report_layers(layers_done, 0)
        self._launched.append(launched)
        return launched

    def _finish(self, launched: _OracleLaunch) -> tuple[tuple[Sample, ...], ...]:
        """Compute a launch. Raises EngineFault if the batch has the poison token or follows a
        failed launch, or no token may be chosen."""
        if self._launched.popleft() is not launched:
            raise RuntimeError("samples are asked for out of order")
        before, self._drawn = self._drawn, ()
        slices = [_followed(part, before) for part in launched.batch.slices]
        tables = launched.slot_tables
        first = self._stages[1] if self._spec.is_pipelined else self._stages[0]
        self._write_all(slices, tables, range(first.start, self._options.num_layers))
        states = [self._write_states(part) for part in slices]
        if any(self._options.poison_token_id in part.token_ids for part in slices):
            raise EngineFault(f"token {self._options.poison_token_id} is poison")
        if self._states:
            for part in slices:
                end = part.start + len(part.token_ids)
                self._states.end_step(part.block_table, part.start, end)
        samples = tuple(
            tuple(self._sample(part, table, row, after) for row in part.rows)
            for part, table, after in zip(slices, tables, states, strict=True)
        )
        self._drawn = tuple(chain.from_iterable(samples))
        if (rest_s := launched.end_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        for stage in range(int(self._spec.is_pipelined), len(self._stages)):
            self._report_layers(launched.layers_done, stage)
        return samples

    def _report_layers(self, layers_done: LayersDone | None, stage: int) -> None:
        layers, size = self._stages[stage], self._options.layer_group_size
        if layers_done:
            for first in layers[::size]:
                layers_done(first, min(size, layers.stop - first))

    def _write_all(
        self, parts: Sequence[SequenceSlice], tables: Sequence[Sequence[int]], stage: range
    ) -> None:
        """Write the KV of a stage's layers. Raises EngineFault for a block without a slot."""
        if self._kv.slot_tables and any(min(table) < 0 for table in tables):
            raise EngineFault("windowed layers have no KV of what a sequence attends to")
        for part, table in zip(parts, tables, strict=True):
            self._write(part, table, stage)

    def _write(self, part: SequenceSlice, slot_table: Sequence[int], stage: range) -> None:
        size = self._options.block_size
        memories = self._memories(part.block_table, slot_table)
        state = _ROOT
        if part.start:
            position = part.start - 1
            _, data, table = memories[0]
            slot = int(data[table[position // size], 0, 0, 0, position % size, 0])
            state = slot ^ int(self._weights[0, 0, 0, 0])
        states = np.empty(len(part.token_ids), dtype=np.uint64)
        own = zlib.crc32(part.adapter.encode())
        for index, token_id in enumerate(part.token_ids):
            states[index] = state = mix(state ^ (token_id + 1) * 0xD6E8FEB86659FD93 ^ own)
        slots = states[:, np.newaxis] ^ self._weights[..., np.newaxis, :]
        end = part.start + len(states)
        for index in range(part.start // size, -(-end // size)):
            first, stop = max(part.start, index * size), min(end, (index + 1) * size)
            inside = slice(first - index * size, stop - index * size)
            written = slice(first - part.start, stop - part.start)
            for layers, data, table in memories:
                there = range(self._options.num_layers)[layers]
                places = slice(bisect_left(there, stage.start), bisect_left(there, stage.stop))
                block = data[table[index]]
                block[places, :, :, inside] = slots[layers][places, :, :, written]

    def _write_states(self, part: SequenceSlice) -> Sequence[int]:
        """State hashes after each new token; writes the last. All 0 without state layers. Raises
        EngineFault if the previous states are missing."""
        memory = self._states
        if memory is None:
            return [0] * len(part.token_ids)
        try:
            before, place = memory.begin_step(part.block_table, part.start)
        except ValueError as error:
            raise EngineFault(str(error)) from error
        state = _ROOT
        if before:
            words = memory.data[before].view(np.uint64) ^ _STATE_WORDS
            state = int(np.sum(words * _STATE_SHARES, dtype=np.uint64))
        own, after = ~zlib.crc32(part.adapter.encode()), []
        for token_id in part.token_ids:
            state = mix(state ^ (token_id + 1) * 0xD6E8FEB86659FD93 ^ own)
            after.append(state)
        memory.data[place].view(np.uint64)[...] = np.uint64(state) ^ _STATE_WORDS
        return after

    def _memories(
        self, block_table: Sequence[int], slot_table: Sequence[int]
    ) -> tuple[tuple[slice, _Words, Sequence[int]], ...]:
        """Memories of the layers, the one with the model's first layer first: (layers, words of
        their blocks, block ids there) each."""
        kv = self._kv
        if isinstance(kv, ArrayKvPool):
            return ((slice(None), kv.data.view(np.uint64), block_table),)
        tables = dict.fromkeys(kv.slot_tables, slot_table)
        return tuple(
            (
                _slice_of(group.layers),
                kv.pools[group.number].data.view(np.uint64),
                tables.get(group.number, block_table),
            )
            for group in sorted(kv.groups.paged, key=lambda group: group.layers[0])
        )

    def _sample(
        self,
        part: SequenceSlice,
        slot_table: Sequence[int],
        row: SampleRow,
        states: Sequence[int],
    ) -> Sample:
        """states: hash after each of the slice's tokens."""
        digest = self._digest(part.block_table, slot_table, part.start + row.offset + 1)
        return choose(digest ^ states[row.offset], row, self._options.vocab_size)

    def _digest(
        self, block_table: Sequence[int], slot_table: Sequence[int], num_tokens: int
    ) -> int:
        """Position-dependent hash of the KV of tokens [0, num_tokens), of windowed layers only in
        the window, read from the blocks."""
        size = self._options.block_size
        num_blocks = -(-num_tokens // size)
        layout = self._kv.layout
        shape = (layout.num_layers, 2, layout.num_kv_heads, size, layout.head_dim)
        places = _places_of(shape, 1 << num_blocks.bit_length())[:num_blocks]
        mixed = np.empty((num_blocks, *shape), dtype=np.uint64)
        for layers, data, table in self._memories(block_table, slot_table):
            mixed[:, layers] = data[list(table[:num_blocks])]
        mixed ^= places
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(29)
        mixed *= places | np.uint64(1)
        mixed[-1, :, :, :, num_tokens - (num_blocks - 1) * size :] = 0
        for group in self._kv.groups.paged:
            if begin := group.kept_start(num_tokens - 1):
                own = _slice_of(group.layers)
                mixed[: begin // size, own] = 0
                mixed[begin // size, own, :, :, : begin % size] = 0
        return mix(int(np.sum(mixed, dtype=np.uint64)))


@lru_cache(maxsize=8)
def _places_of(shape: tuple[int, ...], num_blocks: int) -> _Words:
    """One word per word of a sequence's blocks, [num_blocks, *block shape], by token, then by place
    in it. Fewer blocks give a prefix of this."""
    layers, kinds, heads, size, dims = shape
    by_token = (num_blocks, size, layers, kinds, heads, dims)
    numbers = np.arange(1, math.prod(by_token) + 1, dtype=np.uint64)
    words = (numbers * np.uint64(0xBF58476D1CE4E5B9)).reshape(by_token)
    return np.ascontiguousarray(np.moveaxis(words, 1, 4))


def _kept(batch: Batch) -> Batch:
    """A copy that is independent of the caller's lists."""
    return Batch(
        tuple(
            part._replace(
                block_table=tuple(part.block_table),
                rows=tuple(row._replace(token_ids=tuple(row.token_ids)) for row in part.rows),
            )
            for part in batch.slices
        )
    )


def _followed(part: SequenceSlice, drawn: Sequence[Sample]) -> SequenceSlice:
    """Replace FOLLOWING by the token that the previous launch drew. Raises EngineFault if there is
    none, or if rows depend on it."""
    if part.follows is None:
        return part
    if part.follows >= len(drawn):
        raise EngineFault("the launch before drew no such row")
    if any(row.sampling.has_penalties or row.sampling.bad_words for row in part.rows):
        raise EngineFault("a row depends on a token that is still being drawn")
    return part._replace(token_ids=(drawn[part.follows].token_id,))


def oracle_tokens(
    prompt: Sequence[int],
    sampling: Sampling,
    vocab_size: int,
    choice: int = 0,
    allowed: Callable[[Sequence[int]], bytes | None] | None = None,
    adapter: str = "",
    layers: OracleLayers = FULL_LAYERS,
) -> list[int]:
    """Output of an undisturbed request on any oracle engine of default shape.

    allowed: from an output, SampleRow.allowed; None for unrestricted output.
    """
    engine = undisturbed_oracle(vocab_size, layers)
    token_ids = list(prompt)
    start = 0
    while True:
        mask = allowed(token_ids[len(prompt) :]) if allowed else None
        row = SampleRow(len(token_ids) - start - 1, sampling, token_ids, len(prompt), choice, mask)
        part = SequenceSlice(token_ids[start:], start, [0], (row,), adapter=adapter)
        start = len(token_ids)
        token_ids.append(engine.forward(Batch((part,)))[0][0].token_id)
        num_output = len(token_ids) - len(prompt)
        end = finish_reason(token_ids[-1], num_output, len(token_ids), sampling, REFERENCE_LEN)
        if end is not FinishReason.NONE:
            return token_ids[len(prompt) :]


def undisturbed_oracle(vocab_size: int, layers: OracleLayers) -> OracleEngine:
    """An engine of default shape for one sequence with a single block: the reference of others."""
    size = REFERENCE_LEN
    engine = OracleEngine(OracleOptions(1, block_size=size, vocab_size=vocab_size, layers=layers))
    for table in engine.kv.slot_tables.values():
        table.of_block[0] = 0
    return engine


def _slice_of(layers: Sequence[int]) -> slice:
    """Slice of layers at equal distances, as in oracle_layout."""
    return slice(layers[0], layers[-1] + 1, layers[1] - layers[0] if len(layers) > 1 else 1)


def _slot_weights(layout: KvLayout) -> _Words:
    """One word per (layer, part, head, dimension), so that swapped places are detected."""
    shape = (layout.num_layers, layout.num_parts, layout.num_kv_heads, layout.head_dim)
    words = [mix(_ROOT + index) for index in range(int(np.prod(shape)))]
    return np.array(words, dtype=np.uint64).reshape(shape)
