"""Kernels that write KV into a pool, pack it and unpack it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from baton_kernels import kv_convert as convert_twins
from baton_kernels import kv_pack as pack_twins
from baton_kernels.gpu import kv_convert, kv_pack
from baton_kernels.gpu.latent_kv_write import latent_kv_write
from baton_kernels.gpu.rope_kv_write import rope_kv_write
from baton_kernels.kv_convert import DTYPES, Conversion
from baton_kernels.kv_pack import Runs
from baton_kernels.kv_write import slot_rows
from baton_kernels.layer import Norm
from baton_kernels.quantize_rows import dequantize_rows
from baton_kernels.rope import rope_tables
from baton_kernels.word_sum import key_of
from bench.gpu.case import FP8, Case, Sizes, Trial, randn, relative_error, share_unequal
from bench.gpu.paged_batch import in_one_memory
from engine.kv.range import KvRange
from kv_transfer.wire_format import WireFormat


def _rope(
    dtype: torch.dtype | None, has_norms: bool, generator: torch.Generator, sizes: Sizes
) -> Trial:
    """dtype: of the pool, None for the 16-bit one."""
    (num_heads, num_kv_heads), dim, device = sizes.heads, 128, generator.device
    fused = randn(generator, sizes.num_tokens, num_heads + 2 * num_kv_heads, dim).to(sizes.half)
    query, key, value = fused.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    positions = torch.randint(0, 8192, (len(fused),), generator=generator, device=device)
    inv_freq = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    cos, sin = rope_tables(positions, inv_freq[None], 1.0, sizes.half)
    num_blocks = -(-len(fused) // 16)
    shape = (num_blocks, 2, 2, num_kv_heads, 16, dim)
    pool, scales = torch.zeros(shape, dtype=dtype or sizes.half, device=device), None
    if dtype is not None:
        pool, scales = in_one_memory(pool, torch.zeros(shape[:-1], device=device))
    slots = torch.randperm(num_blocks * 16, generator=generator, device=device)[: len(fused)]
    rows = slot_rows(slots, pool)
    weight = randn(generator, dim).to(sizes.half)
    norm = Norm(weight, 1e-6) if has_norms else None

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return rope_kv_write(query, key, value, cos, sin, pool, 1, rows, scales, norm, norm)

    def error(got: tuple[torch.Tensor, torch.Tensor]) -> float:
        wide_cos, wide_sin = (torch.cat((t, t), -1).double()[:, None] for t in (cos, sin))

        def turn(x: torch.Tensor) -> torch.Tensor:
            x = x.double()
            if has_norms:
                x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
            first, second = x.chunk(2, dim=-1)
            return x * wide_cos + torch.cat((-second, first), -1) * wide_sin

        written = pool if scales is None else dequantize_rows(pool, scales, torch.float32)
        at = written[slots // 16, 1, :, :, slots % 16]
        wanted_kv = torch.stack((turn(key), value.double()), dim=1)
        return max(
            relative_error(got[0], turn(query)),
            relative_error(got[1], turn(key)),
            relative_error(at, wanted_kv),
        )

    return Trial(run, error, 1e-2 if dtype in (None, torch.int8) else 5e-2)


def _latent(dtype: torch.dtype | None, generator: torch.Generator, sizes: Sizes) -> Trial:
    """DeepSeek's sizes. dtype: of the pool, None for the 16-bit one."""
    rank, dim, num_heads, device = 512, 64, 16, generator.device
    absorbed = randn(generator, sizes.num_tokens, num_heads, rank).to(sizes.half)
    turned = randn(generator, sizes.num_tokens, num_heads, dim).to(sizes.half)
    latent = randn(generator, sizes.num_tokens, rank + dim).to(sizes.half)
    positions = torch.randint(0, 8192, (len(latent),), generator=generator, device=device)
    inv_freq = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    cos, sin = rope_tables(positions, inv_freq[None], 1.0, sizes.half)
    num_blocks = -(-len(latent) // 16)
    shape = (num_blocks, 2, 1, 1, 16, rank + dim)
    pool, scales = torch.zeros(shape, dtype=dtype or sizes.half, device=device), None
    if dtype is not None:
        pool, scales = in_one_memory(pool, torch.zeros(shape[:-1], device=device))
    slots = torch.randperm(num_blocks * 16, generator=generator, device=device)[: len(latent)]
    rows = slot_rows(slots, pool)
    norm = Norm(randn(generator, rank).to(sizes.half), 1e-6)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return latent_kv_write(absorbed, turned, latent, norm, cos, sin, pool, 1, rows, scales)

    def error(got: tuple[torch.Tensor, torch.Tensor]) -> float:
        wide_cos, wide_sin = (torch.cat((t, t), -1).double() for t in (cos, sin))

        def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            first, second = x.double().chunk(2, dim=-1)
            return x.double() * cos + torch.cat((-second, first), -1) * sin

        query = (absorbed.double(), turn(turned, wide_cos[:, None], wide_sin[:, None]))
        plain = latent[:, :rank].double()
        plain = plain * (plain.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        turned_row = turn(latent[:, rank:], wide_cos, wide_sin)
        row = torch.cat((plain * norm.weight.double(), turned_row), -1)
        written = pool if scales is None else dequantize_rows(pool, scales, torch.float32)
        return max(
            relative_error(got[0], torch.cat(query, -1)),
            relative_error(got[1][:, 0], row),
            relative_error(written[slots // 16, 1, 0, 0, slots % 16], row),
        )

    # The peak of a row of normalised, weighted elements is several times their root mean square, so
    # an int8 step is wider than for keys.
    return Trial(run, error, {None: 1e-2, torch.int8: 2e-2}.get(dtype, 5e-2))


def _pack(generator: torch.Generator, sizes: Sizes) -> Trial:
    num_blocks, device = sizes.num_tokens // 16 + 3, generator.device
    pool = randn(generator, num_blocks, 4, 2, sizes.heads[1], 16, 128).to(sizes.half)
    ids = torch.randperm(num_blocks, generator=generator, device=device).tolist()
    shape = (3, 2, sizes.heads[1], sizes.num_tokens, 128)
    packed, back = torch.empty(shape, dtype=pool.dtype, device=device), torch.zeros_like(pool)

    def run() -> None:
        kv_pack.kv_pack(pool, ids, 5, 1, packed)
        kv_pack.kv_unpack(back, ids, 5, 1, packed)

    def error(_got: None) -> float:
        wanted, wanted_back = torch.empty_like(packed), torch.zeros_like(pool)
        pack_twins.kv_pack.twin(pool, ids, 5, 1, wanted)
        pack_twins.kv_unpack.twin(wanted_back, ids, 5, 1, wanted)
        return share_unequal(packed, wanted) + share_unequal(back, wanted_back)

    return Trial(run, error, 0.0)


def _pack_summed(generator: torch.Generator, sizes: Sizes) -> Trial:
    num_blocks, device = sizes.num_tokens // 16 + 3, generator.device
    shape = (num_blocks, 4, 2, sizes.heads[1], 16, 32)
    pool = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator, device=device)
    ids = torch.randperm(num_blocks, generator=generator, device=device).tolist()
    runs = Runs(5, sizes.num_tokens, 1, 3, 16)
    num_words = sizes.num_tokens * 3 * 2 * sizes.heads[1] * 32
    payload = torch.empty(num_words, dtype=torch.int64, device=device)
    key, back = key_of(1), torch.zeros_like(pool)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        sent = kv_pack.kv_pack_summed(pool, ids, runs, payload, key)
        return sent, kv_pack.kv_unpack_summed(back, ids, runs, payload, key)

    def error(got: tuple[torch.Tensor, torch.Tensor]) -> float:
        wanted, wanted_back = torch.empty_like(payload), torch.zeros_like(pool)
        total = pack_twins.kv_pack_summed.twin(pool, ids, runs, wanted, key)
        pack_twins.kv_unpack_summed.twin(wanted_back, ids, runs, wanted, key)
        unequal = share_unequal(payload, wanted) + share_unequal(back, wanted_back)
        return unequal + sum(share_unequal(each[None], total[None]) for each in got)

    return Trial(run, error, 0.0)


def _convert(pool_dtype: str, wire_dtype: str, generator: torch.Generator, sizes: Sizes) -> Trial:
    """Convert to the payload's type, and back."""
    num_blocks, device = sizes.num_tokens // 16 + 3, generator.device
    values = randn(generator, num_blocks, 4, 2, sizes.heads[1], 16, 128).to(DTYPES[pool_dtype])
    blocks = values.view(torch.uint8).flatten(-2)
    back, wanted_back = (torch.zeros_like(blocks) for _ in range(2))
    ids = torch.randperm(num_blocks, generator=generator, device=device).tolist()
    wire = WireFormat(wire_dtype, sizes.heads[1], 128, 16)
    num_bytes = wire.num_bytes(KvRange(5, sizes.num_tokens, 1, 3))
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    runs, conversion = (
        Runs(5, sizes.num_tokens, 1, 3, 16),
        Conversion(pool_dtype, wire_dtype, False, 128),
    )

    def run() -> None:
        kv_convert.kv_encode(blocks, ids, runs, conversion, payload)
        kv_convert.kv_decode(back, ids, runs, conversion, payload)

    def error(_got: None) -> float:
        wanted = torch.zeros_like(payload)
        convert_twins.kv_encode.twin(blocks, ids, runs, conversion, wanted)
        convert_twins.kv_decode.twin(wanted_back, ids, runs, conversion, payload)
        return share_unequal(payload, wanted) + share_unequal(back, wanted_back)

    return Trial(run, error, 0.0)


def kv_cases() -> Sequence[Case]:
    """See above."""
    return (
        Case("rope_kv_write", partial(_rope, None, False)),
        Case("rope_kv_write with norms", partial(_rope, None, True)),
        Case("rope_kv_write int8", partial(_rope, torch.int8, False)),
        Case("rope_kv_write fp8", partial(_rope, FP8, False), 89, is_interpretable=False),
        Case("latent_kv_write", partial(_latent, None)),
        Case("latent_kv_write int8", partial(_latent, torch.int8)),
        Case("latent_kv_write fp8", partial(_latent, FP8), 89, is_interpretable=False),
        Case("kv_pack and kv_unpack", _pack),
        Case("kv_pack_summed and kv_unpack_summed", _pack_summed),
        Case("kv_convert bfloat16 to fp8", partial(_convert, "bfloat16", "fp8")),
        Case("kv_convert float16 to int8", partial(_convert, "float16", "int8")),
    )
