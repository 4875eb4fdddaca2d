"""Every kernel with random inputs and a measure of its error, for a GPU, the interpreter and the
compiler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from baton_kernels.experts import GroupedLinear, RowOrder
from baton_kernels.experts import combine as combine_op
from baton_kernels.experts import route as route_op
from baton_kernels.gated_activation import clamped_swiglu as clamped_swiglu_op
from baton_kernels.gpu.experts import (
    combine,
    grouped_linear,
    headwise_linear,
    order_rows,
    route,
)
from baton_kernels.gpu.fixed_linear import fixed_linear
from baton_kernels.gpu.gated_activation import clamped_swiglu, geglu, swiglu
from baton_kernels.gpu.rms_norm import rms_norm
from baton_kernels.gpu.routing import tile_rows_for
from baton_kernels.layer import Routing
from baton_kernels.linear import Linear, PlainLinear
from baton_kernels.mxfp4_linear import Mxfp4Linear, pack_mxfp4
from baton_kernels.quantize_rows import dequantize_rows, quantize_rows
from baton_kernels.quantized_linear import (
    Float8Linear,
    IntLinear,
    IntWeight,
    dequantize,
    pack_int_weight,
)
from bench.gpu.attention_cases import attention_cases
from bench.gpu.case import Case, Sizes, Trial, randn, relative_error, share_unequal
from bench.gpu.kv_cases import kv_cases
from bench.gpu.quantized_cases import quantized_cases
from bench.gpu.sampling_cases import sampling_cases

#: Like those of Mixtral, Qwen 3, DeepSeek-V3 and DeepSeek-V2, in this order.
_ROUTINGS = {
    "softmax": Routing(8, 2, False, True, 1.0, 1, 1),
    "softmax 100 experts": Routing(100, 8, False, True, 1.0, 1, 1),
    "sigmoid groups": Routing(256, 8, True, True, 2.5, 8, 4),
    "softmax groups": Routing(60, 6, False, False, 1.0, 6, 3, group_top=1),
}


def _rms_norm(generator: torch.Generator, sizes: Sizes) -> Trial:
    x = (randn(generator, sizes.num_tokens, sizes.hidden) * 3).to(sizes.half)
    weight = randn(generator, sizes.hidden).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        wide = x.double()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return relative_error(got, wide * scale * weight.double())

    return Trial(lambda: rms_norm(x, weight, 1e-5), error, 1e-2)


def _swiglu(generator: torch.Generator, sizes: Sizes) -> Trial:
    x = (randn(generator, sizes.num_tokens, 2 * sizes.hidden) * 3).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        gate, up = x.double().chunk(2, dim=-1)
        return relative_error(got, gate * torch.sigmoid(gate) * up)

    return Trial(lambda: swiglu(x), error, 1e-2)


def _geglu(generator: torch.Generator, sizes: Sizes) -> Trial:
    x = (randn(generator, sizes.num_tokens, 2 * sizes.hidden) * 3).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        gate, up = x.double().chunk(2, dim=-1)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh")
        return relative_error(got, gelu * up)

    return Trial(lambda: geglu(x), error, 1e-2)


def _clamped_swiglu(generator: torch.Generator, sizes: Sizes) -> Trial:
    x = (randn(generator, sizes.num_tokens, 2 * sizes.hidden) * 3).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        return relative_error(got, clamped_swiglu_op.twin(x.double()))

    return Trial(lambda: clamped_swiglu(x), error, 1e-2)


def _grouped_linear(scheme: str, generator: torch.Generator, sizes: Sizes) -> Trial:
    """Four experts with biases, two per token. scheme: half, mxfp4, or int8, int4 or fp8 in
    groups of 128 inputs."""
    shape = (4, sizes.hidden, sizes.hidden)
    weights = (randn(generator, *shape) / sizes.hidden**0.5).to(sizes.half)
    biases = randn(generator, *shape[:2]).to(sizes.half)
    linears: list[Linear] = [PlainLinear(w, b) for w, b in zip(weights, biases, strict=True)]
    if scheme == "fp8":
        runs = weights.view(*shape[:2], -1, 128)
        codes, scales = quantize_rows.twin(runs, torch.float8_e4m3fn)
        weights = dequantize_rows(codes, scales, torch.float32).view(shape)
        linears = [
            Float8Linear(code.view(shape[1:]), scale.t().contiguous(), bias)
            for code, scale, bias in zip(codes, scales, biases, strict=True)
        ]
    elif scheme == "mxfp4":
        blocks = [_mxfp4(bias, generator, sizes) for bias in biases]
        weights = torch.stack([linear.dequantize() for linear in blocks])
        linears = list(blocks)
    elif scheme != "half":
        packed = [_integers(scheme, generator, sizes) for _ in range(len(biases))]
        weights = torch.stack([dequantize(weight) for weight in packed])
        linears = [IntLinear(weight, bias) for weight, bias in zip(packed, biases, strict=True)]
    experts = GroupedLinear(linears)
    first = torch.arange(sizes.num_tokens, device=weights.device) % 3
    chosen = torch.stack((first, first + 1), 1).int()
    x = randn(generator, sizes.num_tokens, sizes.hidden).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        wide = x.double()
        by_expert = torch.stack(
            [wide @ w.double().t() + b for w, b in zip(weights, biases, strict=True)]
        )
        tokens = torch.arange(len(x), device=x.device)[:, None]
        return relative_error(got, by_expert[chosen.long(), tokens].flatten(0, 1))

    # x is rounded to float8, too.
    tolerance = 5e-2 if scheme == "fp8" else 1e-2
    return Trial(lambda: grouped_linear(x, chosen, experts, 2), error, tolerance)


def _headwise_linear(generator: torch.Generator, sizes: Sizes) -> Trial:
    """Eight heads, as of latent attention."""
    weights = (randn(generator, 8, 64, 128) / 128**0.5).to(sizes.half)
    layers = GroupedLinear([PlainLinear(weight, None) for weight in weights])
    x = randn(generator, sizes.num_tokens, 8, 128).to(sizes.half)

    def error(got: torch.Tensor) -> float:
        return relative_error(got, torch.einsum("thi,hoi->tho", x.double(), weights.double()))

    return Trial(lambda: headwise_linear(x, layers), error, 1e-2)


def _route(routing: Routing, generator: torch.Generator, sizes: Sizes) -> Trial:
    """With a bias; the first token has equal logits."""
    logits = randn(generator, sizes.num_tokens, routing.num_experts)
    logits[0] = 1.0
    bias = randn(generator, routing.num_experts) / 10 if routing.is_sigmoid else None
    chosen, weights = route_op.twin(logits, bias, routing)

    def error(got: tuple[torch.Tensor, torch.Tensor]) -> float:
        return share_unequal(got[0], chosen) + relative_error(got[1], weights)

    return Trial(lambda: route(logits, bias, routing), error, 1e-5)


def _order_rows(num_experts: int, generator: torch.Generator, sizes: Sizes) -> Trial:
    """More rows than are read at once; the upper half of the experts has none."""
    shape, device = (sizes.num_tokens + 150, 8), generator.device
    chosen = torch.randint(0, num_experts // 2, shape, generator=generator, device=device).int()
    order = chosen.flatten().argsort(stable=True)
    first = torch.nn.functional.pad(
        chosen.flatten().bincount(minlength=num_experts).cumsum(0), (1, 0)
    )

    def error(got: RowOrder) -> float:
        tile_rows = tile_rows_for(chosen.numel(), num_experts)
        tile_ends = (-(-first.diff() // tile_rows)).cumsum(0)
        pairs = ((got.order, order), (got.first, first), (got.tile_ends, tile_ends))
        return sum(share_unequal(*pair) for pair in pairs)

    return Trial(lambda: order_rows(chosen, num_experts), error, 0.0)


def _combine(generator: torch.Generator, sizes: Sizes) -> Trial:
    parts = randn(generator, sizes.num_tokens * 3, sizes.hidden).to(sizes.half)
    weights = randn(generator, sizes.num_tokens, 3)
    shared, residual = (
        randn(generator, sizes.num_tokens, sizes.hidden).to(sizes.half) for _ in "sr"
    )
    wanted = combine_op.twin(parts, weights, shared, residual)

    def error(got: torch.Tensor) -> float:
        return relative_error(got, wanted)

    return Trial(lambda: combine(parts, weights, shared, residual), error, 1e-6)


def _integers(scheme: str, generator: torch.Generator, sizes: Sizes) -> IntWeight:
    """Random levels; weights of usual size."""
    bits = 4 if scheme == "int4" else 8
    device, shape = generator.device, (sizes.hidden, sizes.hidden)
    levels = torch.randint(0, 1 << bits, shape, generator=generator, device=device).byte()
    groups = (sizes.hidden, sizes.hidden // 128)
    scales = torch.rand(groups, generator=generator, device=device) / (sizes.hidden**0.5 * 2**bits)
    zeros = torch.randint(0, 1 << bits, groups, generator=generator, device=device).float()
    return pack_int_weight(levels, scales, zeros, bits)


def _mxfp4(bias: torch.Tensor, generator: torch.Generator, sizes: Sizes) -> Mxfp4Linear:
    """Random numbers; weights of usual size."""
    device, rows = generator.device, sizes.hidden
    codes = torch.randint(256, (rows, rows // 2), generator=generator, device=device).byte()
    powers = torch.randint(118, 124, (rows, rows // 32), generator=generator, device=device).byte()
    return pack_mxfp4(codes, powers, bias)


def _fixed_linear(generator: torch.Generator, sizes: Sizes) -> Trial:
    weight = (randn(generator, sizes.hidden, sizes.hidden) / sizes.hidden**0.5).to(sizes.half)
    bias = randn(generator, sizes.hidden).to(sizes.half)
    x, residual = (randn(generator, sizes.num_tokens, sizes.hidden).to(sizes.half) for _ in "xr")

    def error(got: torch.Tensor) -> float:
        return relative_error(got, x.double() @ weight.double().T + bias + residual)

    return Trial(lambda: fixed_linear(x, weight, bias, residual, sizes.half), error, 1e-2)


def all_cases() -> Sequence[Case]:
    """Every kernel, in every form that a GPU runs."""
    return (
        *attention_cases(),
        Case("rms_norm", _rms_norm),
        Case("swiglu", _swiglu),
        Case("geglu", _geglu),
        Case("clamped_swiglu", _clamped_swiglu),
        Case("grouped linear", partial(_grouped_linear, "half")),
        Case("grouped linear int8", partial(_grouped_linear, "int8")),
        Case("grouped linear int4", partial(_grouped_linear, "int4")),
        Case("grouped linear mxfp4", partial(_grouped_linear, "mxfp4")),
        Case("grouped linear fp8", partial(_grouped_linear, "fp8"), 89, is_interpretable=False),
        Case("headwise linear", _headwise_linear),
        *(Case(f"route {name}", partial(_route, routing)) for name, routing in _ROUTINGS.items()),
        Case("order of rows, 8 experts", partial(_order_rows, 8)),
        Case("order of rows, 200 experts", partial(_order_rows, 200)),
        Case("combine", _combine),
        Case("batch-invariant linear", _fixed_linear),
        *kv_cases(),
        *sampling_cases(),
        *quantized_cases(),
    )
