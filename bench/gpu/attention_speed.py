"""Paged attention compared with its roof and with torch's own attention."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from baton_kernels.attention_backends import LIBRARIES, load_backend, why_not
from baton_kernels.gpu.attention_plan import (
    AttentionPlan,
    Tile,
    choose_tile,
    fixed_tile,
    list_items,
)
from baton_kernels.gpu.paged_attention import attend
from baton_kernels.paged_attention import AttentionSlice
from bench.gpu.case import relative_error
from bench.gpu.paged_batch import in_one_memory
from bench.gpu.setting import Result, Setting, time_ms


@dataclass(frozen=True, slots=True)
class Load:
    """Equal sequences, each with cached and new tokens. kv: half, int8 or fp8."""

    num_seqs: int
    cached: int
    new: int = 1
    block_size: int = 16
    is_shuffled: bool = True
    kv: str = "half"
    window: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


def _shrunk(load: Load, setting: Setting) -> Load:
    if not setting.is_dry:
        return load
    small = replace(load, num_heads=4, num_kv_heads=1, head_dim=16)
    return replace(
        small, num_seqs=min(load.num_seqs, 2), cached=min(load.cached, 20), new=min(load.new, 3)
    )


def _pool(load: Load, setting: Setting) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Pool of one layer, its scales, and all block ids in order of use."""
    num_blocks = load.num_seqs * -(-(load.cached + load.new) // load.block_size)
    shape = (num_blocks, 1, 2, load.num_kv_heads, load.block_size, load.head_dim)
    order = (
        torch.randperm(num_blocks, generator=setting.generator(), device=setting.device)
        if load.is_shuffled
        else torch.arange(num_blocks)
    )
    if load.kv == "half":
        return setting.randn(*shape), None, order.tolist()
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[load.kv]
    codes = torch.randint(-100, 100, shape, generator=setting.generator(), device=setting.device)
    scales = torch.full(shape[:-1], 0.01, device=setting.device)
    codes = codes.to(torch.int8 if load.kv == "int8" else torch.float32).to(dtype)
    return *in_one_memory(codes, scales), order.tolist()


def _plan(
    load: Load,
    pool: torch.Tensor,
    order: list[int],
    dtype: torch.dtype,
    choose: Callable[[int, torch.Tensor, torch.dtype], Tile] = choose_tile,
) -> AttentionPlan:
    width = len(order) // load.num_seqs
    slices = [
        AttentionSlice(i * load.new, load.new, load.cached, order[i * width : (i + 1) * width])
        for i in range(load.num_seqs)
    ]
    return list_items(
        slices, pool, load.num_heads, load.head_dim**-0.5, load.window, dtype, choose=choose
    )


def _always(tile: Tile, _num_rows: int, _pool: torch.Tensor, _dtype: torch.dtype) -> Tile:
    return tile


def _costs(load: Load, pool: torch.Tensor, scales: torch.Tensor | None) -> dict[str, float]:
    """Minimum bytes: keys and values once, queries and outputs once. Operations: two products per
    visible pair."""
    length = load.cached + load.new
    per_token = (
        2
        * load.num_kv_heads
        * (load.head_dim * pool.element_size() + (4 if scales is not None else 0))
    )
    rows = 2 * load.new * load.num_heads * load.head_dim * 2
    pairs = load.new * (load.cached + (load.new + 1) / 2)
    return {
        "bytes": float(load.num_seqs * (length * per_token + rows)),
        "flops": 4.0 * load.num_seqs * load.num_heads * load.head_dim * pairs,
    }


def paged(
    load: Load,
    setting: Setting,
    choose: Callable[[int, torch.Tensor, torch.dtype], Tile] = choose_tile,
) -> Result:
    """One layer's attention. choose: returns the tile for a number of rows."""
    load = _shrunk(load, setting)
    pool, scales, order = _pool(load, setting)
    plan = _plan(load, pool, order, setting.half, choose)
    query = setting.randn(load.num_seqs * load.new, load.num_heads, load.head_dim)
    ms = time_ms(lambda: attend(query, pool, scales, 0, plan), setting)
    return {"ms": ms, **_costs(load, pool, scales)}


def tiles(load: Load, candidates: tuple[Tile, ...], setting: Setting) -> Result:
    """The same with other tiles, fastest first: the basis of attention_plan.choose_tile."""
    load = _shrunk(load, setting)
    pool, scales, order = _pool(load, setting)
    query = setting.randn(load.num_seqs * load.new, load.num_heads, load.head_dim)
    times = {}
    for tile in candidates[: setting.pick(len(candidates), 1)]:
        plan = _plan(load, pool, order, setting.half, partial(_always, tile))
        name = f"m{tile.block_m} n{tile.block_n} warps{tile.num_warps} stages{tile.num_stages}"
        # Skip tiles that do not fit.
        with suppress(OutOfResources):
            times[name] = time_ms(partial(attend, query, pool, scales, 0, plan), setting)
    return dict(sorted(times.items(), key=lambda item: item[1]))


def by_library(name: str, load: Load, setting: Setting) -> Result:
    """One layer's attention of a prompt by --attention-backend `name`, including the gathering of
    earlier keys. error: relative to Baton's kernel."""
    library = LIBRARIES[name]
    if reason := why_not(name):
        return {"skipped": reason}
    if setting.is_dry and library.needs_gpu:
        return {"skipped": f"{name} computes on GPUs"}
    # More new tokens than a verification has: libraries run prompts only.
    load = replace(_shrunk(load, setting), new=setting.pick(load.new, 20))
    pool, _, order = _pool(load, setting)
    query = setting.randn(load.new, load.num_heads, load.head_dim)
    backend = load_backend(name)
    scale = load.head_dim**-0.5
    slices = [AttentionSlice(0, load.new, load.cached, order)]
    plan = backend.plan(slices, pool, load.num_heads, scale, load.window)
    at = torch.arange(load.cached, load.cached + load.new, device=setting.device)
    blocks = torch.tensor(order, device=setting.device)[at // load.block_size]
    key, value = (pool[blocks, 0, part, :, at % load.block_size] for part in range(2))

    def run() -> torch.Tensor:
        return backend.attend(query, key, value, pool, 0, plan)

    wanted = attend(query, pool, None, 0, _plan(load, pool, order, setting.half))
    error = relative_error(run(), wanted)
    return {"ms": time_ms(run, setting), "error": error, **_costs(load, pool, None)}


def sdpa(load: Load, setting: Setting, backend: SDPBackend | None = None) -> Result:
    """torch's own causal attention of one new sequence with contiguous KV: the peer of a prefill.
    backend: torch's choice by default."""
    if backend == SDPBackend.CUDNN_ATTENTION and setting.is_dry:
        return {"skipped": "cuDNN computes on GPUs"}
    load = _shrunk(load, setting)
    size = load.new
    query = setting.randn(1, load.num_heads, size, load.head_dim)
    key, value = (setting.randn(1, load.num_kv_heads, size, load.head_dim) for _ in range(2))

    def run() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    try:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            ms = time_ms(run, setting)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return {"skipped": "torch has no such kernel for these shapes here"}
    return {"ms": ms, "flops": 2.0 * load.num_heads * load.head_dim * size * (size + 1)}


def flashinfer_decode(load: Load, setting: Setting) -> Result:
    """flashinfer's paged decode, if its wheel is installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return {"skipped": "flashinfer is not installed"}
    flashinfer: Any = importlib.import_module("flashinfer")
    load = _shrunk(load, setting)
    pool, _, order = _pool(load, setting)
    width = len(order) // load.num_seqs
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=setting.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    ids = torch.tensor(order, dtype=torch.int32, device=setting.device)
    starts = torch.arange(load.num_seqs + 1, dtype=torch.int32, device=setting.device) * width
    last = (load.cached + load.new - 1) % load.block_size + 1
    lasts = torch.full((load.num_seqs,), last, dtype=torch.int32, device=setting.device)
    wrapper.plan(
        starts, ids, lasts, load.num_heads, load.num_kv_heads, load.head_dim, load.block_size,
        q_data_type=setting.half, kv_data_type=setting.half,
    )  # fmt: skip
    query = setting.randn(load.num_seqs, load.num_heads, load.head_dim)
    kv = pool[:, 0].contiguous()
    ms = time_ms(lambda: wrapper.run(query, kv), setting)
    return {"ms": ms, **_costs(load, pool, None)}


def invariance(setting: Setting) -> Result:
    """Number of elements that differ between a sequence's rows alone and in a batch, decoded and
    verified: 0 is right."""
    load = replace(_shrunk(Load(8, 3000), setting), new=5)
    pool, _, order = _pool(load, setting)
    width = len(order) // load.num_seqs
    query = setting.randn(load.num_seqs * load.new, load.num_heads, load.head_dim)
    together = attend(query, pool, None, 0, _plan(load, pool, order, setting.half))
    last = load.new - 1
    parts = {
        "alone": AttentionSlice(0, load.new, load.cached, order[:width]),
        "decoded": AttentionSlice(0, 1, load.cached + last, order[:width]),
    }
    results = {}
    for name, part in parts.items():
        plan = list_items([part], pool, load.num_heads, load.head_dim**-0.5, None)
        rows = slice(load.new - part.num_tokens, load.new)
        got = attend(query[rows].contiguous(), pool, None, 0, plan)
        results[name] = float((got != together[rows]).sum())
    return results


_DECODE = Load(64, 4095)
_PREFILL = Load(1, 0, 8192)

ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "attention decode 64 x 4K": partial(paged, _DECODE),
    **{
        f"attention {what} batch-invariant": partial(paged, load, choose=fixed_tile)
        for what, load in (
            ("decode 64 x 4K", _DECODE),
            ("decode 1 x 32K", Load(1, 32767)),
            ("prefill 8K", _PREFILL),
        )
    },
    "attention decode 64 x 4K contiguous": partial(paged, Load(64, 4095, is_shuffled=False)),
    "attention decode 64 x 4K block 64": partial(paged, Load(64, 4095, block_size=64)),
    "attention decode 1 x 1K": partial(paged, Load(1, 1023)),
    "attention decode 256 x 1K": partial(paged, Load(256, 1023)),
    "attention decode 1 x 32K": partial(paged, Load(1, 32767)),
    "attention decode 8 x 32K": partial(paged, Load(8, 32767)),
    "attention decode 8 x 32K fp8": partial(paged, Load(8, 32767, kv="fp8")),
    "attention decode 8 x 32K int8": partial(paged, Load(8, 32767, kv="int8")),
    "attention decode 64 x 4K window 1K": partial(paged, Load(64, 4095, window=1024)),
    "attention verify 64 x 4K, 5 tokens": partial(paged, Load(64, 4091, 5)),
    "attention prefill 2K": partial(paged, Load(1, 0, 2048)),
    "attention prefill 8K": partial(paged, _PREFILL),
    "attention prefill 32K": partial(paged, Load(1, 0, 32768)),
    "attention prefill 2K over 8K": partial(paged, Load(1, 8192, 2048)),
    "attention 32 tokens over 32K": partial(paged, Load(1, 32768, 32)),
    "attention 256 tokens over 32K": partial(paged, Load(1, 32768, 256)),
    "attention prefill 8K block 64": partial(paged, Load(1, 0, 8192, block_size=64)),
}

#: Attention of torch and of libraries.
PEERS: Mapping[str, Callable[[Setting], Result]] = {
    "SDPA prefill 8K": partial(sdpa, _PREFILL),
    **{
        f"attention {what} by {name}": partial(by_library, name, load)
        for what, load in (
            ("prefill 8K", _PREFILL),
            ("prefill 32K", Load(1, 0, 32768)),
            ("prefill 2K over 8K", Load(1, 8192, 2048)),
        )
        for name in LIBRARIES
    },
    **{
        f"SDPA prefill {what} by {name}": partial(sdpa, Load(1, 0, num_tokens), backend=backend)
        for what, num_tokens in (("2K", 2048), ("8K", 8192), ("32K", 32768))
        for name, backend in (
            ("cuDNN", SDPBackend.CUDNN_ATTENTION),
            ("FlashAttention 2", SDPBackend.FLASH_ATTENTION),
        )
    },
    "flashinfer decode 64 x 4K": partial(flashinfer_decode, _DECODE),
}

#: Items for choosing tiles.
TILES: Mapping[str, Callable[[Setting], Result]] = {
    "tiles decode 64 x 4K": partial(
        tiles,
        _DECODE,
        tuple(Tile(16, n, w, s) for n in (32, 64, 128) for w in (2, 4) for s in (2, 3, 4, 5)),
    ),
    "tiles prefill 8K": partial(
        tiles,
        _PREFILL,
        tuple(Tile(128, n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3, 4)),
    ),
}
