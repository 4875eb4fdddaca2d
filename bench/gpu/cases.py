"""Each kernel with random inputs and a way to tell how wrong its result is: for a GPU, the interpreter and the compiler alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from baton_kernels import kv_pack as pack_twins
from baton_kernels import quantized_linear as linear_twins
from baton_kernels import sampling as sampling_twins
from baton_kernels.gpu import kv_pack, paged_attention, quantized_linear, sampling
from baton_kernels.gpu.quantize_rows import quantize_rows
from baton_kernels.gpu.rms_norm import rms_norm
from baton_kernels.gpu.rope_kv_write import rope_kv_write
from baton_kernels.gpu.swiglu import swiglu
from baton_kernels.kv_pack import Runs
from baton_kernels.kv_write import slot_rows
from baton_kernels.quantize_rows import dequantize_rows
from baton_kernels.quantize_rows import quantize_rows as quantize_op
from baton_kernels.rope import rope_tables
from baton_kernels.word_sum import key_of
from bench.gpu.paged_batch import Heads, in_one_memory, make_paged_batch, reference_attention

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Sizes:
    """half: the 16-bit dtype: float16 in the interpreter, whose bfloat16 products are wrong. lengths: (cached, new) tokens."""

    half: torch.dtype
    num_tokens: int
    hidden: int
    vocab_size: int
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]


#: For the compiler and the interpreter: every tile and branch, little work.
TINY = Sizes(torch.bfloat16, 3, 256, 500, (8, 2), ((520, 1), (20, 3), (9, 33)))
#: For a GPU: layers of an 8B Llama.
LARGE = Sizes(
    torch.bfloat16, 1000, 4096, 128256, (32, 8), ((0, 1), (4000, 1), (1500, 5), (700, 600), (0, 900))
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One run on fixed inputs. error: of what `run` returned; more than `tolerance`, or NaN, is wrong."""

    run: Callable[[], Any]
    error: Callable[[Any], float]
    tolerance: float


@dataclass(frozen=True, slots=True)
class Case:
    """min_arch: below it the kernel does not compile. is_interpretable: whether the interpreter gets it right."""

    name: str
    build: Callable[[torch.Generator, Sizes], Trial]
    min_arch: int = 80
    is_interpretable: bool = True


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """|got - wanted| / |wanted|, of the whole tensor, in float64."""
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def share_unequal(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The share of elements that differ."""
    return float((got != wanted).double().mean())


def _randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


@dataclass(frozen=True, slots=True)
class _Attention:
    """What an attention case is about. dtype: of the pool, None for the 16-bit one."""

    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    has_slopes: bool = False


def _attention(about: _Attention, generator: torch.Generator, sizes: Sizes) -> Trial:
    heads = Heads(*sizes.heads, about.head_dim)
    is_quantised = about.dtype in (torch.int8, FP8)
    dtype = sizes.half if is_quantised or about.dtype is None else about.dtype
    batch = make_paged_batch(sizes.lengths, heads, about.block_size, dtype, generator)
    pool, scales = batch.pool, None
    if is_quantised and about.dtype is not None:
        pool, scales = in_one_memory(*quantize_op.twin(batch.pool, about.dtype))
        rounded = [
            tuple(dequantize_rows(*quantize_op.twin(x, about.dtype), torch.float32) for x in kv)
            for kv in batch.history
        ]
        batch = replace(batch, history=tuple((keys, values) for keys, values in rounded))
    slopes = None
    if about.has_slopes:
        slopes = 2.0 ** -torch.arange(1, heads.num_heads + 1, device=pool.device).float()
    scale = about.head_dim**-0.5
    rules = (about.window, about.softcap, slopes)
    plan = paged_attention.plan_attention(
        batch.slices,
        pool,
        heads.num_heads,
        scale,
        about.window,
        dtype,
        softcap=about.softcap,
        slopes=slopes,
    )
    return Trial(
        lambda: paged_attention.attend(batch.query, pool, scales, batch.layer, plan),
        lambda got: relative_error(got, reference_attention(batch, scale, *rules)),
        2e-5 if dtype == torch.float32 else 1e-2,
    )


def _rms_norm(generator: torch.Generator, sizes: Sizes) -> Trial:
    x = (_randn(generator, sizes.num_tokens, sizes.hidden) * 3).to(sizes.half)
    weight = _randn(generator, sizes.hidden).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        wide = x.double()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return relative_error(got, wide * scale * weight.double())

    return Trial(lambda: rms_norm(x, weight, 1e-5), error, 1e-2)


def _swiglu(generator: torch.Generator, sizes: Sizes) -> Trial:
    x = (_randn(generator, sizes.num_tokens, 2 * sizes.hidden) * 3).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        gate, up = x.double().chunk(2, dim=-1)
        return relative_error(got, gate * torch.sigmoid(gate) * up)

    return Trial(lambda: swiglu(x), error, 1e-2)


def _rope(dtype: torch.dtype | None, generator: torch.Generator, sizes: Sizes) -> Trial:
    """dtype: of the pool, None for the 16-bit one."""
    (num_heads, num_kv_heads), dim, device = sizes.heads, 128, generator.device
    fused = _randn(generator, sizes.num_tokens, num_heads + 2 * num_kv_heads, dim).to(sizes.half)
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

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return rope_kv_write(query, key, value, cos, sin, pool, 1, rows, scales)

    def error(got: tuple[torch.Tensor, torch.Tensor]) -> float:
        wide_cos, wide_sin = (torch.cat((t, t), -1).double()[:, None] for t in (cos, sin))

        def turn(x: torch.Tensor) -> torch.Tensor:
            first, second = x.double().chunk(2, dim=-1)
            return x.double() * wide_cos + torch.cat((-second, first), -1) * wide_sin

        written = pool if scales is None else dequantize_rows(pool, scales, torch.float32)
        at = written[slots // 16, 1, :, :, slots % 16]
        wanted_kv = torch.stack((turn(key), value.double()), dim=1)
        return max(
            relative_error(got[0], turn(query)),
            relative_error(got[1], turn(key)),
            relative_error(at, wanted_kv),
        )

    return Trial(run, error, 1e-2 if dtype in (None, torch.int8) else 5e-2)


def _pack(generator: torch.Generator, sizes: Sizes) -> Trial:
    num_blocks, device = sizes.num_tokens // 16 + 3, generator.device
    pool = _randn(generator, num_blocks, 4, 2, sizes.heads[1], 16, 128).to(sizes.half)
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


def _draw(generator: torch.Generator, sizes: Sizes) -> Trial:
    logits = _randn(generator, 64, sizes.vocab_size) * 2
    keys = torch.randint(-(2**31), 2**31, (64, 2), generator=generator, device=generator.device).to(
        torch.int32
    )
    return Trial(
        lambda: sampling.gumbel_argmax(logits, keys),
        lambda got: share_unequal(got, sampling_twins.gumbel_argmax.twin(logits, keys)),
        # Only where two tokens are closer than a few units in the last place.
        1 / 64,
    )


def _keep(
    kernel: Callable[[torch.Tensor, torch.Tensor], None],
    twin: Callable[[torch.Tensor, torch.Tensor], None],
    value: float,
    generator: torch.Generator,
    sizes: Sizes,
) -> Trial:
    """value: top_k if it is 1 or more, else top_p."""
    logits = _randn(generator, 4, sizes.vocab_size) * 3
    dtype = torch.int64 if value >= 1 else torch.float32
    argument = torch.full((4,), value, dtype=dtype, device=logits.device)
    got = logits.clone()

    def error(_got: None) -> float:
        wanted = logits.clone()
        twin(wanted, argument)
        return share_unequal(got, wanted) * sizes.vocab_size

    # Tokens per row that may differ: top_p adds in another order.
    return Trial(lambda: kernel(got, argument), error, 0.0 if value >= 1 else 1.0)


def _quantize(dtype: torch.dtype, generator: torch.Generator, sizes: Sizes) -> Trial:
    x = _randn(generator, sizes.num_tokens, sizes.hidden).to(sizes.half)
    return Trial(
        lambda: quantize_rows(x, dtype),
        lambda got: relative_error(dequantize_rows(got[0], got[1], torch.float64), x),
        2e-2 if dtype == torch.int8 else 5e-2,
    )


def _linear(scheme: str, num_rows: int, generator: torch.Generator, sizes: Sizes) -> Trial:
    """scheme: int8, int4 or fp8."""
    num_in, num_out = sizes.hidden, sizes.hidden + 32
    device = generator.device
    x = _randn(generator, num_rows, num_in).to(sizes.half)
    if scheme == "fp8":
        args = quantize_op.twin(_randn(generator, num_out, num_in) * 0.02, FP8)
        return Trial(
            lambda: quantized_linear.fp8_linear(x, *args),
            lambda got: relative_error(got, linear_twins.fp8_linear.twin(x.float(), *args)),
            1e-2,
        )
    bits = 4 if scheme == "int4" else 8
    levels = torch.randint(0, 1 << bits, (num_out, num_in), generator=generator, device=device)
    shape = (num_out, num_in // 128)
    scales = torch.rand(shape, generator=generator, device=device) * 0.01
    zeros = torch.randint(0, 1 << bits, shape, generator=generator, device=device).float()
    weight = linear_twins.pack_int_weight(levels.byte(), scales, zeros, bits)
    return Trial(
        lambda: quantized_linear.int_linear(x, weight),
        lambda got: relative_error(got, x.double() @ linear_twins.dequantize(weight).double().t()),
        1e-2,
    )


def all_cases() -> Sequence[Case]:
    """Every kernel, in every form that a GPU runs."""
    attention = {
        "bf16": _Attention(),
        "bf16 window": _Attention(window=100),
        "bf16 softcap alibi": _Attention(softcap=20.0, has_slopes=True),
        "bf16 head_dim 64 block 64": _Attention(head_dim=64, block_size=64),
        "bf16 head_dim 256": _Attention(head_dim=256, block_size=32),
        "bf16 head_dim 80": _Attention(head_dim=80),
        "fp16": _Attention(dtype=torch.float16),
        "fp32": _Attention(dtype=torch.float32, head_dim=64),
        "int8": _Attention(dtype=torch.int8),
        "fp8": _Attention(dtype=FP8),
    }
    keep_k = partial(_keep, sampling.keep_top_k, sampling_twins.keep_top_k.twin, 50)
    keep_p = partial(_keep, sampling.keep_top_p, sampling_twins.keep_top_p.twin, 0.9)
    return (
        *(
            Case(f"attention {name}", partial(_attention, about), 89 if about.dtype == FP8 else 80)
            for name, about in attention.items()
        ),
        Case("rms_norm", _rms_norm),
        Case("swiglu", _swiglu),
        Case("rope_kv_write", partial(_rope, None)),
        Case("rope_kv_write int8", partial(_rope, torch.int8)),
        Case("rope_kv_write fp8", partial(_rope, FP8), 89, is_interpretable=False),
        Case("kv_pack and kv_unpack", _pack),
        Case("kv_pack_summed and kv_unpack_summed", _pack_summed),
        Case("gumbel_argmax", _draw),
        Case("keep_top_k", keep_k),
        Case("keep_top_p", keep_p),
        Case("quantize_rows int8", partial(_quantize, torch.int8)),
        Case("quantize_rows fp8", partial(_quantize, FP8), 89, is_interpretable=False),
        *(
            Case(f"linear {scheme} {num_rows} rows", partial(_linear, scheme, num_rows), arch, ok)
            for scheme, arch, ok in (("int8", 80, True), ("int4", 80, True), ("fp8", 89, False))
            for num_rows in (1, 40, 300)
        ),
    )
