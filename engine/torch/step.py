"""Step metadata, built once on the host from a batch: the input of the layers, and faults of
requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from baton.errors import EngineFault
from baton_kernels.host_copy import to_device
from baton_kernels.kv_write import block_rows
from baton_kernels.paged_attention import AttentionSlice, plan_attention
from engine.families.config import ModelConfig
from engine.interface import Batch, EngineSpec, SampleRow, SequenceSlice
from engine.kv.block_table import BlockTable
from engine.kv.tensors.grouped import GroupedKvPool
from engine.kv.tensors.paged import GroupedTensorPool
from engine.sampling.edits import names_unknown_token
from engine.torch.decoder import AdapterRows, PackedBatch, PackedTokens, WindowedKv
from engine.torch.device_tables import DeviceTables
from engine.torch.rope import Rope
from engine.torch.step_adapters import EachAdapter, StepAdapters

#: baton_kernels.paged_attention.plan_attention, or a device's own version.
PlanAttention = Callable[..., Any]

NO_ADAPTERS: StepAdapters = EachAdapter(MappingProxyType({}))


class WindowedStep(NamedTuple):
    """A step's KV of windowed layers in their own pool: each slice's block table there (see
    GroupedKvPool.slot_table), the pool and its scales. pool None: all layers share a pool."""

    tables: Sequence[Sequence[int]] = ()
    pool: torch.Tensor | None = None
    scales: torch.Tensor | None = None


NOT_APART = WindowedStep()


def fault(reason: str, slices: Sequence[int]) -> EngineFault:
    """A fault of some slices of a batch, with their comma-separated indices in
    metadata["slices"]."""
    return EngineFault(reason, slices=",".join(map(str, sorted(set(slices)))))


def check_batch(batch: Batch, spec: EngineSpec, num_drawn: int) -> None:
    """Check a batch before anything is written. Raises EngineFault if a slice would read or write
    outside its own blocks, or follows a row outside the num_drawn of the step before."""
    wrong = [
        (index, text)
        for index, part in enumerate(batch.slices)
        if (text := next(_faults(part, spec, num_drawn), ""))
    ]
    if wrong:
        raise fault("; ".join(sorted({text for _, text in wrong})), [index for index, _ in wrong])


def _faults(part: SequenceSlice, spec: EngineSpec, num_drawn: int) -> Iterator[str]:
    """Yield the faults of a slice. Do not advance past the first: later checks assume its absence
    and may raise."""
    end, num_blocks, vocab_size = part.start + len(part.token_ids), spec.num_blocks, spec.vocab_size
    if not part.token_ids or part.start < 0:
        yield "a slice needs new tokens at positions from 0"
    if part.follows is not None and not (0 <= part.follows < num_drawn and end == part.start + 1):
        yield "a slice follows what was not drawn just before"
    if end > spec.max_model_len:
        yield f"a sequence grows past max_model_len={spec.max_model_len}"
    if end > len(part.block_table) * spec.layout.block_size:
        yield "a block table is too short for its sequence"
    table = part.block_table
    # A pool checks its own tables when they grow, so a step need not scan contexts.
    bound = table.num_blocks if isinstance(table, BlockTable) else max(table) + 1
    if bound > num_blocks or (not isinstance(table, BlockTable) and min(table) < 0):
        yield f"a block id is not in [0, {num_blocks})"
    if min(part.token_ids) < 0 or max(part.token_ids) >= vocab_size:
        yield f"a token id is not in [0, {vocab_size})"
    # Rows of a sequence share their sampling; a prompt may have a row per token.
    samplings = {id(row.sampling): row.sampling for row in part.rows}.values()
    if any(names_unknown_token(sampling, vocab_size) for sampling in samplings):
        yield (
            "logit_bias, bad_words or a list of token ids name a token that is not in "
            f"[0, {vocab_size})"
        )
    for row in part.rows:
        if not 0 <= row.offset < len(part.token_ids):
            yield "a sample row points outside its slice"
        if row.scored_token_id is not None and not 0 <= row.scored_token_id < vocab_size:
            yield f"a scored token id is not in [0, {vocab_size})"


def pack_tokens(batch: Batch, pool: torch.Tensor) -> PackedTokens:
    """A step's tokens and their places in `pool`, on its device."""
    device = pool.device
    token_ids = _tensor(chain.from_iterable(s.token_ids for s in batch.slices))
    ranges = [range(s.start, s.start + len(s.token_ids)) for s in batch.slices]
    rows, slices = _placed_in(pool, batch.slices)
    _, sampled, _ = sample_rows(batch)
    is_all = sampled == list(range(batch.num_tokens))
    return PackedTokens(
        to_device(token_ids, device),
        to_device(_tensor(chain.from_iterable(ranges)), device),
        rows,
        slices,
        None if is_all else to_device(torch.tensor(sampled, dtype=torch.int64), device),
    )


def _placed_in(
    pool: torch.Tensor, parts: Sequence[SequenceSlice]
) -> tuple[torch.Tensor, list[AttentionSlice]]:
    """PackedTokens.first_rows on the device, and slices, for the pool of the block tables."""
    block_size, rows_of_block = pool.shape[4], block_rows(pool)
    rows = array("q")
    for part in parts:
        position, end = part.start, part.start + len(part.token_ids)
        while position < end:
            index, offset = divmod(position, block_size)
            count = min(block_size - offset, end - position)
            first = part.block_table[index] * rows_of_block + offset
            rows.extend(range(first, first + count))
            position += count
    begins = accumulate((len(part.token_ids) for part in parts), initial=0)
    slices = [
        AttentionSlice(begin, len(part.token_ids), part.start, part.block_table)
        for part, begin in zip(parts, begins, strict=False)
    ]
    return to_device(_tensor(rows), pool.device), slices


def window_tables(batch: Batch, kv: GroupedKvPool[Any]) -> list[array[int]]:
    """Block tables of a batch's slices in the windowed layers' pool. Raises EngineFault for slices
    that would read or write without a slot."""
    tables = [
        kv.slot_table(part.block_table, part.start, part.start + len(part.token_ids))
        for part in batch.slices
    ]
    if wrong := [index for index, table in enumerate(tables) if min(table) < 0]:
        raise fault("windowed layers have no KV of what a sequence attends to", wrong)
    return tables


def windowed_step(batch: Batch, kv: object) -> WindowedStep:
    """Windowed layers' view of a pool in a step. Raises EngineFault, see window_tables."""
    if not isinstance(kv, GroupedTensorPool):
        return NOT_APART
    own = kv.in_slots
    return WindowedStep(window_tables(batch, kv), own.tensor, own.scales)


def pack_batch(
    batch: Batch,
    config: ModelConfig,
    rope: Rope,
    pool: torch.Tensor,
    dtype: torch.dtype,
    adapters: StepAdapters = NO_ADAPTERS,
    tables: DeviceTables | None = None,
    plan: PlanAttention = plan_attention,
    apart: WindowedStep = NOT_APART,
) -> PackedBatch:
    """Metadata of one step over `pool`, on its device, for a model that computes in `dtype`.
    adapters: those that slices may name. tables: block tables on the device, updated here. plan:
    attention planner of the device. apart: windowed layers' pool; then `pool` has full layers
    only."""
    tokens = pack_tokens(batch, pool)
    positions = tokens.positions
    lengths = to_device(_rope_lengths(batch), pool.device) if rope.is_dynamic else positions
    spans = [range(s.start, s.start + len(s.token_ids)) for s in batch.slices]
    rotations = rope.tables(positions, lengths, spans, dtype)
    heads, scale = config.num_heads, config.traits.attention_scale
    placed = tables.placed([part.block_table for part in batch.slices]) if tables else None
    windowed, windows_pool, windows_slices, in_slots = None, pool, tokens.slices, placed
    if apart.pool is not None:
        parts = zip(batch.slices, apart.tables, strict=True)
        in_windows = [part._replace(block_table=table) for part, table in parts]
        windows_pool = apart.pool
        first_rows, windows_slices = _placed_in(windows_pool, in_windows)
        windowed = WindowedKv(windows_pool, apart.scales, first_rows)
        in_slots = tables.slots.placed(apart.tables) if tables and tables.slots else None
    plans = {
        window: plan(
            tokens.slices if window is None else windows_slices,
            pool if window is None else windows_pool,
            *(heads, scale, window, dtype, placed if window is None else in_slots),
        )
        for window in set(config.windows)
    }
    has_adapters = any(part.adapter for part in batch.slices)
    rows = _adapter_rows(batch, adapters, pool.device) if has_adapters else ()
    return PackedBatch(
        tokens.token_ids, rotations, tokens.first_rows, plans, tokens.sampled, rows, windowed
    )


def _adapter_rows(
    batch: Batch, adapters: StepAdapters, device: torch.device
) -> tuple[AdapterRows, ...]:
    """Raise EngineFault, see check_adapters."""
    check_adapters(batch, adapters)
    of_tokens = [part.adapter for part in batch.slices for _ in part.token_ids]
    _, sampled, _ = sample_rows(batch)
    return adapters.rows(of_tokens, [of_tokens[row] for row in sampled], device)


def check_adapters(batch: Batch, adapters: StepAdapters) -> None:
    """Raise EngineFault for slices with an unknown adapter."""
    wanted = [part.adapter for part in batch.slices]
    if wrong := [index for index, name in enumerate(wanted) if name and name not in adapters]:
        raise fault(f"adapter {wanted[wrong[0]]!r} is not loaded", wrong)


def take_drawn(token_ids: torch.Tensor, batch: Batch, drawn: torch.Tensor) -> None:
    """Copy tokens drawn by the step before into the slices that follow it, in place. token_ids
    [tokens], drawn [rows] int64, on one device."""
    ends = accumulate(len(part.token_ids) for part in batch.slices)
    following = [
        (end - 1, part.follows)
        for end, part in zip(ends, batch.slices, strict=True)
        if part.follows is not None
    ]
    if not following:
        return
    places, rows = zip(*following, strict=True)
    device = token_ids.device
    token_ids[to_device(torch.tensor(places), device)] = drawn[
        to_device(torch.tensor(rows), device)
    ]


def sample_rows(batch: Batch) -> tuple[list[SampleRow], list[int], list[int]]:
    """All sample rows of a batch, with the packed row that each samples after, and its slice."""
    rows: list[SampleRow] = []
    packed: list[int] = []
    owners: list[int] = []
    first = 0
    for index, part in enumerate(batch.slices):
        rows += part.rows
        packed += [first + row.offset for row in part.rows]
        owners += [index] * len(part.rows)
        first += len(part.token_ids)
    return rows, packed, owners


def _tensor(numbers: Iterable[int]) -> torch.Tensor:
    """int64 tensor; far faster than torch.tensor of a list."""
    values = array("q", numbers)
    if not values:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(values, dtype=torch.int64)


def _rope_lengths(batch: Batch) -> torch.Tensor:
    """Length that selects the frequencies of each token: see engine.torch.rope."""
    return _tensor(
        max(position + 1, s.num_prompt_tokens)
        for s in batch.slices
        for position in range(s.start, s.start + len(s.token_ids))
    )
