"""All other kernels compared with their roofs. Sizes of an 8B Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from baton_kernels.gpu.gated_activation import swiglu
from baton_kernels.gpu.kv_pack import kv_pack, kv_unpack
from baton_kernels.gpu.rms_norm import rms_norm
from baton_kernels.gpu.rope_kv_write import rope_kv_write
from baton_kernels.gpu.sampling import gumbel_argmax, keep_top_k, keep_top_p
from baton_kernels.kv_write import slot_rows
from bench.gpu.setting import Result, Setting, time_ms

VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM = 128256, 4096, 14336, 32, 8, 128


def _norm(setting: Setting) -> Result:
    x = setting.randn(setting.pick(16384, 3), setting.pick(HIDDEN, 64))
    weight = setting.randn(x.shape[1])
    return {"ms": time_ms(lambda: rms_norm(x, weight, 1e-5), setting), "bytes": 4.0 * x.numel()}


def _swiglu(setting: Setting) -> Result:
    x = setting.randn(setting.pick(8192, 3), 2 * setting.pick(INTERMEDIATE, 64))
    return {"ms": time_ms(lambda: swiglu(x), setting), "bytes": 3.0 * x.numel()}


def _rope(setting: Setting) -> Result:
    num_tokens = setting.pick(16384, 3)
    fused = setting.randn(num_tokens, HEADS + 2 * KV_HEADS, DIM)
    query, key, value = fused.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
    cos, sin = setting.randn(num_tokens, DIM // 2), setting.randn(num_tokens, DIM // 2)
    pool = setting.randn(-(-num_tokens // 16), 1, 2, KV_HEADS, 16, DIM)
    rows = slot_rows(torch.arange(num_tokens, device=setting.device), pool)
    ms = time_ms(lambda: rope_kv_write(query, key, value, cos, sin, pool, 0, rows), setting)
    written = HEADS + 3 * KV_HEADS
    return {"ms": ms, "bytes": 2.0 * (fused.numel() + num_tokens * written * DIM)}


def _pack(is_unpack: bool, setting: Setting) -> Result:
    num_tokens, num_layers = setting.pick(8192, 20), setting.pick(32, 2)
    pool = setting.randn(-(-num_tokens // 16), num_layers, 2, KV_HEADS, 16, DIM)
    ids = torch.randperm(len(pool), generator=setting.generator(), device=setting.device).tolist()
    packed = torch.empty(
        num_layers, 2, KV_HEADS, num_tokens, DIM, dtype=pool.dtype, device=pool.device
    )
    table = torch.tensor(ids, dtype=torch.int32, device=setting.device)
    function = kv_unpack if is_unpack else kv_pack
    ms = time_ms(lambda: function(pool, table, 0, 0, packed), setting)
    return {"ms": ms, "bytes": 4.0 * packed.numel()}


def _pack_to_host(setting: Setting) -> Result:
    """Pack, then copy to pinned memory: the path of shared memory and sockets. Its roof is the bus,
    not the copy."""
    num_tokens, num_layers = setting.pick(8192, 20), setting.pick(32, 2)
    pool = setting.randn(-(-num_tokens // 16), num_layers, 2, KV_HEADS, 16, DIM)
    shape = (num_layers, 2, KV_HEADS, num_tokens, DIM)
    packed = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    host = torch.empty(shape, dtype=pool.dtype, pin_memory=not setting.is_dry)
    table = torch.arange(len(pool), dtype=torch.int32, device=setting.device)

    def run() -> None:
        kv_pack(pool, table, 0, 0, packed)
        host.copy_(packed, non_blocking=True)

    return {"ms": time_ms(run, setting), "host_bytes": 2.0 * packed.numel()}


def _logits(setting: Setting, num_rows: int) -> torch.Tensor:
    return setting.randn(setting.pick(num_rows, 2), setting.pick(VOCAB, 50)).float() * 3


def _draw(num_rows: int, setting: Setting) -> Result:
    logits = _logits(setting, num_rows)
    keys = torch.arange(2 * len(logits), dtype=torch.int32, device=setting.device).view(-1, 2)
    ms = time_ms(lambda: gumbel_argmax(logits, keys), setting)
    return {"ms": ms, "bytes": 4.0 * logits.numel()}


def _filter(is_top_p: bool, num_rows: int, setting: Setting) -> Result:
    """Each call filters the result of the one before: the work is the same."""
    logits = _logits(setting, num_rows)
    if is_top_p:
        top_p = torch.full((len(logits),), 0.9, device=setting.device)
        return {"ms": time_ms(lambda: keep_top_p(logits, top_p), setting)}
    top_k = torch.full((len(logits),), 50, device=setting.device)
    return {"ms": time_ms(lambda: keep_top_k(logits, top_k), setting)}


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "rms_norm 16K x 4096": _norm,
    "swiglu 8K x 14336": _swiglu,
    "rope_kv_write 16K tokens": _rope,
    "kv_pack 8K tokens": partial(_pack, False),
    "kv_unpack 8K tokens": partial(_pack, True),
    "kv_pack 8K tokens to the host": _pack_to_host,
    "gumbel_argmax 1 row": partial(_draw, 1),
    "gumbel_argmax 256 rows": partial(_draw, 256),
    "keep_top_k 1 row": partial(_filter, False, 1),
    "keep_top_k 64 rows": partial(_filter, False, 64),
    "keep_top_p 1 row": partial(_filter, True, 1),
    "keep_top_p 64 rows": partial(_filter, True, 64),
}
