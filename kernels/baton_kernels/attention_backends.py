"""Attention backends: Baton's kernels for everything, or a library for prompts and Baton's kernels
for the rest.

A library gets the prompts of a step packed: the queries of all sequences concatenated, and their
keys and values likewise, gathered from the pool for chunks computed earlier. A library is imported
only when its backend is chosen by name.

    prompts.query [tokens, heads, head_dim]; key, value [keys, kv_heads, head_dim]
    queries of a sequence are the last of its keys: query i of n sees keys j <= num_keys - n + i,
    and with a window those that are less than `window` tokens behind

Baton's kernels always run sequences with few new tokens (decode, verification) and quantised pools.
A library cannot run layers with paged_attention.ScoreTerms; the caller checks this before it
chooses one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from baton_kernels.dispatch import on_its_device
from baton_kernels.host_copy import to_device
from baton_kernels.paged_attention import (
    MAX_GROUPED_TOKENS,
    NO_TERMS,
    AttentionPlan,
    AttentionSlice,
    PlacedTables,
    ScoreTerms,
    paged_attention,
    plan_attention,
)

#: Maximum keys gathered at once (a longer single sequence is gathered alone). Bounds the gathered
#: copy; engine.memory_plan.activation_bytes relies on it.
MAX_GATHERED_KEYS = 8192


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Packed prompts, as the module describes. query_ends, key_ends: cumulative lengths, starting
    with 0."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    scale: float
    window: int | None


#: Returns attention outputs [tokens, heads, head_dim].
AttendPrompts = Callable[[PackedPrompts], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts that one library call attends to. rows: rows of the batch, [tokens] int64 or a range;
    places: see _places; empty if all keys are new ones, those of `rows`."""

    rows: torch.Tensor | slice
    places: tuple[torch.Tensor, ...]
    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BackendPlan:
    """Plan of one step, shared by the layers with one window. rest: sequences that are not
    prompts."""

    scale: float
    window: int | None
    prompts: tuple[_Prompts, ...]
    rest: AttentionPlan | None


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """Plans a step's attention and computes it.

    version: empty for the reference; all others agree with it up to rounding. plan: same contract
    as paged_attention.plan_attention. attend: same contract as paged_attention.paged_attention,
    with a plan made by `plan` or by plan_attention. kept_rows: of a head, that it keeps for each
    block and layer beside the KV.
    """

    name: str
    version: str
    plan: Callable[..., Any]
    attend: Callable[..., torch.Tensor]
    kept_rows: int = 0


REFERENCE = AttentionBackend("triton", "", plan_attention, paged_attention)


def batch_invariant() -> AttentionBackend:
    """The reference with one fixed tile and no split of the keys on a GPU: the bits of a row depend
    on its own sequence alone, however it was cut into chunks."""
    # Imported here because Triton is not installed everywhere.
    from baton_kernels.gpu.attention_plan import fixed_tile
    from baton_kernels.gpu.paged_attention import plan_attention as plan_for_gpu

    plan = on_its_device(partial(plan_for_gpu, choose=fixed_tile))
    return AttentionBackend("triton", "batch_invariant", plan, paged_attention)


@dataclass(frozen=True, slots=True)
class _PromptAttention:
    """Attends to prompts with a library, to the rest with the reference."""

    name: str
    attend_prompts: AttendPrompts

    def plan(
        self,
        slices: Sequence[AttentionSlice],
        pool: torch.Tensor,
        num_heads: int,
        scale: float,
        window: int | None,
        dtype: torch.dtype | None = None,
        placed: PlacedTables | None = None,
    ) -> Any:
        """See paged_attention.plan_attention."""
        is_ours = dtype not in (None, pool.dtype) or pool.shape[2] != 2
        numbers = range(len(slices))
        prompts = [i for i in numbers if not is_ours and slices[i].num_tokens > MAX_GROUPED_TOKENS]
        if not prompts:
            return plan_attention(slices, pool, num_heads, scale, window, dtype, placed)
        others = sorted(set(numbers) - set(prompts))
        rest = None
        if others:
            own = placed and PlacedTables(placed.entries, [placed.begins[i] for i in others])
            some = [slices[i] for i in others]
            rest = plan_attention(some, pool, num_heads, scale, window, dtype, own)
        fresh = [slices[i] for i in prompts if slices[i].start == 0]
        packed = [_pack(fresh, fresh, (), pool.device)] if fresh else []
        for group in _groups([i for i in prompts if slices[i].start], slices, window):
            parts = [slices[i] for i in group]
            seen = [_from_first_key(part, window) for part in parts]
            tables = [
                placed.entries[placed.begins[i] :]
                if placed
                else to_device(torch.tensor(list(slices[i].block_table)), pool.device)
                for i in group
            ]
            packed.append(_pack(parts, seen, _places(seen, tables, pool), pool.device))
        return BackendPlan(scale, window, tuple(packed), rest)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: Any,
        scales: torch.Tensor | None = None,
        terms: ScoreTerms = NO_TERMS,
    ) -> torch.Tensor:
        """See paged_attention.paged_attention. Raises ValueError for prompts in layers with score
        terms."""
        if not isinstance(plan, BackendPlan):
            return paged_attention(query, key, value, pool, layer, plan, scales, terms)
        if not terms.is_none:
            raise ValueError(f"{self.name} knows no caps, slopes or sinks of scores")
        if plan.rest is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        else:
            out = paged_attention(query, key, value, pool, layer, plan.rest, scales)
        for each in plan.prompts:
            rows = each.rows
            if each.places:
                keys, values = (
                    pool[:, layer, part].transpose(1, 2)[each.places] for part in range(2)
                )
            else:
                keys, values = key[rows], value[rows]
            out[rows] = self.attend_prompts(
                PackedPrompts(
                    query[rows],
                    keys,
                    values,
                    each.query_ends,
                    each.key_ends,
                    plan.scale,
                    plan.window,
                )
            )
        return out


def prompt_backend(name: str, version: str, attend_prompts: AttendPrompts) -> AttentionBackend:
    """A backend that runs prompts with a library's function and the rest with the reference."""
    prompts = _PromptAttention(name, attend_prompts)
    return AttentionBackend(name, version, prompts.plan, prompts.attend)


def _from_first_key(part: AttentionSlice, window: int | None) -> AttentionSlice:
    """Extend the slice to all tokens that any of its queries sees."""
    first = 0 if window is None else max(0, part.start - window + 1)
    end = part.start + part.num_tokens
    return part._replace(start=first, num_tokens=end - first)


def _groups(
    chosen: Sequence[int], slices: Sequence[AttentionSlice], window: int | None
) -> list[list[int]]:
    """Split into groups, in order, each of at most MAX_GATHERED_KEYS keys or of one sequence."""
    groups: list[list[int]] = []
    room = 0
    for index in chosen:
        num_keys = _from_first_key(slices[index], window).num_tokens
        room -= num_keys
        if room < 0:
            groups.append([])
            room = MAX_GATHERED_KEYS - num_keys
        groups[-1].append(index)
    return groups


def _pack(
    parts: Sequence[AttentionSlice],
    seen: Sequence[AttentionSlice],
    places: tuple[torch.Tensor, ...],
    device: torch.device,
) -> _Prompts:
    """Pack prompts. seen: per slice, all tokens that its queries see; places: their places in the
    pool, empty if all of them are new."""
    query_ends = tuple(accumulate((part.num_tokens for part in parts), initial=0))
    key_ends = tuple(accumulate((part.num_tokens for part in seen), initial=0))
    first = parts[0].first_row
    rows: torch.Tensor | slice = slice(first, first + query_ends[-1])
    if any(a.first_row + a.num_tokens != b.first_row for a, b in pairwise(parts)):
        ranges = [torch.arange(p.first_row, p.first_row + p.num_tokens) for p in parts]
        rows = to_device(torch.cat(ranges), device)
    return _Prompts(rows, places, query_ends, key_ends)


def _places(
    parts: Sequence[AttentionSlice], tables: Sequence[torch.Tensor], pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the slices' tokens in the pool: block ids and offsets in the block, both [tokens]
    int64. Offsets are computed on the device."""
    blocks, slots = [], []
    for part, table in zip(parts, tables, strict=True):
        at = torch.arange(part.start, part.start + part.num_tokens, device=pool.device)
        blocks.append(table[at // pool.shape[4]].long())
        slots.append(at % pool.shape[4])
    return torch.cat(blocks), torch.cat(slots)


def _by_sdpa(prompts: PackedPrompts) -> torch.Tensor:
    """Run torch.nn.functional.scaled_dot_product_attention on one sequence at a time. On a GPU this
    is its FlashAttention 2, unless a prompt is longer than the window."""
    results = []
    for queries, keys in _sequences(prompts):
        query = prompts.query[queries].transpose(0, 1)[None]
        key, value = (x[keys].transpose(0, 1)[None] for x in (prompts.key, prompts.value))
        num_new, num_keys = query.shape[2], key.shape[2]
        mask: Any = None
        if prompts.window is not None and num_keys > prompts.window:
            mask = _visible(num_new, num_keys, prompts.window, query.device)
        elif num_new < num_keys and query.device.type == "cuda":
            # Imported late because it loads torch's compiler.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(num_new, num_keys)
        elif num_new < num_keys:
            mask = _visible(num_new, num_keys, None, query.device)
        result = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=prompts.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        results.append(result[0].transpose(0, 1))
    return results[0] if len(results) == 1 else torch.cat(results)


def _sequences(prompts: PackedPrompts) -> list[tuple[slice, slice]]:
    """(queries, keys) of each sequence."""
    queries = [slice(*ends) for ends in pairwise(prompts.query_ends)]
    return list(zip(queries, [slice(*ends) for ends in pairwise(prompts.key_ends)], strict=True))


def _visible(num_new: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Mask [num_new, num_keys] bool, True where a query sees a key."""
    last = num_keys - num_new
    seen = torch.ones(num_new, num_keys, dtype=torch.bool, device=device).tril(last)
    return seen if window is None else seen.triu(last - window + 1)


def _lengths(prompts: PackedPrompts) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """query_ends and key_ends as int32 on the device, and the largest number of queries and of keys
    of a sequence."""
    both = (prompts.query_ends, prompts.key_ends)
    ends = to_device(torch.tensor(both, dtype=torch.int32), prompts.query.device)
    most, most_keys = (max(b - a for a, b in pairwise(each)) for each in both)
    return ends[0], ends[1], most, most_keys


def _band(prompts: PackedPrompts) -> tuple[int, int]:
    """Tokens to the left and to the right that a query sees besides its own (-1: no limit)."""
    return (-1 if prompts.window is None else prompts.window - 1, 0)


def _varlen(library: Any) -> AttendPrompts:
    attend = library.varlen_attn

    def by_varlen(prompts: PackedPrompts) -> torch.Tensor:
        is_grouped = prompts.query.shape[1] != prompts.key.shape[1]
        grouped = {"enable_gqa": True} if is_grouped else {}
        result: torch.Tensor = attend(
            *(prompts.query, prompts.key, prompts.value, *_lengths(prompts)),
            scale=prompts.scale,
            window_size=_band(prompts),
            **grouped,
        )
        return result

    return by_varlen


def _flash_attn(library: Any) -> AttendPrompts:
    def by_flash_attn(prompts: PackedPrompts) -> torch.Tensor:
        result: torch.Tensor = library.flash_attn_varlen_func(
            *(prompts.query, prompts.key, prompts.value, *_lengths(prompts)),
            softmax_scale=prompts.scale,
            causal=True,
            window_size=_band(prompts),
        )
        return result

    return by_flash_attn


def _flashinfer(library: Any) -> AttendPrompts:
    def by_flashinfer(prompts: PackedPrompts) -> torch.Tensor:
        results = [
            library.single_prefill_with_kv_cache(
                *(prompts.query[queries], prompts.key[keys], prompts.value[keys]),
                causal=True,
                sm_scale=prompts.scale,
                window_left=_band(prompts)[0],
            )
            for queries, keys in _sequences(prompts)
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

    return by_flashinfer


@dataclass(frozen=True, slots=True)
class Library:
    """A library that can be chosen. module: name to import; distribution: name of the installed
    package; needs_gpu: requires a GPU and 16-bit types; wanted: parameters that `function` must
    have (older versions lack them)."""

    module: str
    distribution: str
    make: Callable[[Any], AttendPrompts]
    needs_gpu: bool = True
    function: str = ""
    wanted: frozenset[str] = frozenset()


LIBRARIES: Mapping[str, Library] = {
    "sdpa": Library("torch", "torch", lambda _: _by_sdpa, needs_gpu=False),
    "varlen": Library(
        *("torch.nn.attention.varlen", "torch", _varlen),
        function="varlen_attn",
        wanted=frozenset({"scale", "window_size", "enable_gqa"}),
    ),
    "flash-attn": Library("flash_attn", "flash-attn", _flash_attn),
    "flashinfer": Library("flashinfer", "flashinfer-python", _flashinfer),
}


def why_not(name: str) -> str:
    """Why a library cannot be used on this machine and how to fix it; empty if it can."""
    library = LIBRARIES[name]
    # find_spec imports the parents of a dotted name; only torch.* names have parents here.
    if find_spec(library.module) is None:
        install = library.distribution
        return f"{library.module} is not installed; pip install {install}, or use auto"
    if library.wanted:
        function = getattr(importlib.import_module(library.module), library.function)
        if missing := library.wanted - set(inspect.signature(function).parameters):
            return (
                f"{library.function} of {library.distribution} {_version(library)} lacks "
                f"{', '.join(sorted(missing))}; install a newer one, or use auto"
            )
    return ""


def load_backend(name: str) -> AttentionBackend:
    """Import a library and return its backend; `why_not` must be empty for it."""
    library = LIBRARIES[name]
    module = importlib.import_module(library.module)
    return prompt_backend(name, f"{name}{_version(library)}", library.make(module))


def _version(library: Library) -> str:
    return metadata.version(library.distribution).partition("+")[0]
