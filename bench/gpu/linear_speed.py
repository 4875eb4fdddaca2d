"""Linear layers in each form that a GPU runs, compared with 16 bits: gate_up of an 8B Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from baton_kernels.fixed_linear import FixedLinear
from baton_kernels.linear import (
    FusedLinear,
    Linear,
    has_float8,
    pack_float8,
)
from baton_kernels.quantized_linear import IntLinear, pack_int_weight
from baton_kernels.sparse_linear import SparseLinear, can_run_sparse
from bench.gpu.case import FP8, relative_error
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting, time_ms
from bench.quantized_checkpoints import prune

NUM_IN, NUM_OUT = 4096, 2 * 14336
_SCHEMES = ("half", "batch-invariant", "2:4", "fp8", "fp8 grouped", "int8", "int4")
_NUM_ROWS = (1, 16, 64, 256, 8192)
#: Speed of matrix units relative to 16-bit products.
_PRODUCTS = {"2:4": 2.0, "fp8": 2.0, "fp8 grouped": 2.0}
_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class _Layer:
    """run: x [rows, in] -> [rows, out]. num_bytes: of the stored weight."""

    run: Linear
    num_bytes: float


def _shape(setting: Setting) -> tuple[int, int]:
    return setting.pick(NUM_OUT, 32), setting.pick(NUM_IN, 256)


def _cannot(scheme: str, setting: Setting) -> str:
    """Why the layer cannot run here; empty if it can."""
    where = "the CPU" if setting.is_dry else torch.cuda.get_device_name()
    shape = torch.Size(_shape(setting))
    if scheme == "2:4" and not can_run_sparse(setting.device, setting.half, shape):
        return f"{where} has no 2:4 products"
    # The interpreter runs the float8 kernel, but rounds incorrectly.
    if "fp8" in scheme and not (setting.is_dry or has_float8(setting.device, setting.half)):
        return f"{where} has no float8 products"
    return ""


def _make(scheme: str, setting: Setting) -> _Layer:
    num_out, num_in = _shape(setting)
    device, size = setting.device, num_out * num_in
    if scheme == "half":
        return _Layer(FusedLinear(setting.randn(num_out, num_in), None), 2.0 * size)
    if scheme == "batch-invariant":
        return _Layer(FixedLinear(setting.randn(num_out, num_in), None), 2.0 * size)
    if scheme == "2:4":
        # Half of the weights, and two bits for the position of each.
        return _Layer(SparseLinear(prune(setting.randn(num_out, num_in)), None), size * (1 + 1 / 8))
    if "fp8" in scheme:
        codes = setting.randn(num_out, num_in).to(FP8)
        scales = torch.ones(num_out, 1 if scheme == "fp8" else num_in // 128, device=device)
        return _Layer(pack_float8(codes, scales, None, device), size + 4.0 * scales.numel())
    bits = 4 if scheme == "int4" else 8
    levels = torch.randint(0, 1 << bits, (num_out, num_in), device=device).byte()
    scales = torch.rand(num_out, num_in // 128, device=device)
    packed = pack_int_weight(levels, scales, None, bits)
    return _Layer(IntLinear(packed, None), size * bits / 8 + 4.0 * scales.numel())


@cache
def _time(scheme: str, num_rows: int, setting: Setting) -> tuple[float, float]:
    """Milliseconds per layer, and bytes of its weight. Cycles through several layers that together
    exceed the cache."""
    layers = [_make(scheme, setting) for _ in range(setting.pick(4, 1))]
    x = setting.randn(num_rows, layers[0].run.num_in)

    def run() -> None:
        for layer in layers:
            layer.run(x)

    with on_kernels(setting):
        return time_ms(run, setting) / len(layers), layers[0].num_bytes


def _linear(scheme: str, num_rows: int, setting: Setting) -> Result:
    """of_half: time relative to 16-bit weights. flops: in units of the measured roof, so that two
    float8 or 2:4 products count as one."""
    if reason := _cannot(scheme, setting):
        return {"skipped": reason}
    num_out, num_in = _shape(setting)
    num_rows = setting.pick(num_rows, 2)
    ms, weight_bytes = _time(scheme, num_rows, setting)
    half_ms, _ = _time("half", num_rows, setting)
    return {
        "ms": ms,
        "half_ms": half_ms,
        "of_half": ms / half_ms,
        "bytes": weight_bytes + 2.0 * num_rows * (num_in + num_out),
        "flops": 2.0 * num_rows * num_in * num_out / _PRODUCTS.get(scheme, 1.0),
    }


def _check_sparse(setting: Setting) -> Result:
    """torch's compressed product compared with the dense product in float64."""
    if reason := _cannot("2:4", setting):
        return {"skipped": reason}
    weight = prune(setting.randn(512, 1024).cpu()).to(setting.device)
    layer, errors = SparseLinear(weight, None), []
    for num_rows in (1, 40, 300):
        x = setting.randn(num_rows, weight.shape[1])
        residual = setting.randn(num_rows, weight.shape[0])
        wanted = x.double() @ weight.double().t() + residual.double()
        errors.append(relative_error(layer(x, residual), wanted))
    is_right = all(error <= _TOLERANCE for error in errors)
    return {
        "error": max(errors),
        "tolerance": _TOLERANCE,
        "verdict": "right" if is_right else "WRONG",
    }


def _check_fixed(setting: Setting) -> Result:
    """Number of elements that differ between rows alone and in a batch: 0 is right."""
    num_rows, num_in = setting.pick(300, 70), setting.pick(4096, 96)
    layer = FixedLinear(setting.randn(setting.pick(4096, 40), num_in), None)
    x = setting.randn(num_rows, num_in)
    with on_kernels(setting):
        whole = layer(x)
        cuts = (slice(0, 1), slice(num_rows - 1, num_rows), slice(5, 37), slice(3, num_rows))
        unequal = float(sum((layer(x[rows]) != whole[rows]).sum() for rows in cuts))
    return {
        "error": unequal,
        "tolerance": 0.0,
        "verdict": "WRONG" if unequal else "right",
    }


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "check linear batch-invariant": _check_fixed,
    "check linear 2:4": _check_sparse,
    **{
        f"linear {scheme} {num_rows} rows": partial(_linear, scheme, num_rows)
        for num_rows in _NUM_ROWS
        for scheme in _SCHEMES
    },
}
