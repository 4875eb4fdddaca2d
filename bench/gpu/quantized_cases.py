"""Kernels that quantise rows, and linear layers with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from baton_kernels import quantized_linear as linear_twins
from baton_kernels.gpu import quantized_linear
from baton_kernels.gpu.quantize_rows import quantize_rows
from baton_kernels.quantize_rows import dequantize_rows
from baton_kernels.quantize_rows import quantize_rows as quantize_op
from bench.gpu.case import FP8, Case, Sizes, Trial, randn, relative_error


def _quantize(dtype: torch.dtype, generator: torch.Generator, sizes: Sizes) -> Trial:
    x = randn(generator, sizes.num_tokens, sizes.hidden).to(sizes.half)
    return Trial(
        lambda: quantize_rows(x, dtype),
        lambda got: relative_error(dequantize_rows(got[0], got[1], torch.float64), x),
        2e-2 if dtype == torch.int8 else 5e-2,
    )


def _linear(scheme: str, num_rows: int, generator: torch.Generator, sizes: Sizes) -> Trial:
    """scheme: int8, int4, fp8, or fp8 in groups of 128 inputs."""
    # Enough inputs to be split for few rows.
    num_in, num_out = max(sizes.hidden, 1024), sizes.hidden + 32
    device = generator.device
    x = randn(generator, num_rows, num_in).to(sizes.half)
    if scheme.startswith("fp8"):
        num_groups = 1 if scheme == "fp8" else num_in // 128
        weights = randn(generator, num_out, num_groups, num_in // num_groups) * 0.02
        codes, by_output = quantize_op.twin(weights, FP8)
        args = codes.view(num_out, num_in), by_output.t().contiguous()
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


def quantized_cases() -> Sequence[Case]:
    """See above."""
    return (
        Case("quantize_rows int8", partial(_quantize, torch.int8)),
        Case("quantize_rows fp8", partial(_quantize, FP8), 89, is_interpretable=False),
        *(
            Case(f"linear {scheme} {num_rows} rows", partial(_linear, scheme, num_rows), arch, ok)
            for scheme, arch, ok in (
                ("int8", 80, True),
                ("int4", 80, True),
                ("fp8", 89, False),
                ("fp8 grouped", 89, False),
            )
            for num_rows in (1, 40, 300)
        ),
    )
