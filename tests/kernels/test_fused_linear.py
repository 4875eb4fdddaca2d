"""The linears of GPUs, on the CPU: what they add, and that quantised weights get there."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from baton_kernels.linear import FusedLinear
from baton_kernels.quantized_linear import IntLinear, pack_int_weight


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float64])
def test_fused_linear(has_bias: bool, has_residual: bool, out_dtype: torch.dtype | None) -> None:
    x, weight = randn(3, 7), randn(5, 7, seed=1)
    bias = randn(5, seed=2) if has_bias else None
    residual = randn(3, 5, seed=3) if has_residual else None
    wanted = x @ weight.t()
    for extra in (bias, residual):
        wanted = wanted if extra is None else wanted + extra
    given = None if residual is None else residual.clone()
    got = FusedLinear(weight, bias)(x, given, out_dtype)
    assert got.dtype == (out_dtype or x.dtype)
    torch.testing.assert_close(got, wanted.to(got.dtype))


class _Operations(TorchDispatchMode):
    """Names of what torch runs, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.t.default and func.namespace == "aten":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operations(has_residual: bool, out_dtype: torch.dtype | None) -> tuple[list[str], bool]:
    """What one call of a layer in bfloat16 launches on a GPU that is not there, and whether it
    gives the residual's own memory back."""
    with FakeTensorMode():
        shapes = (4, 64), (32, 64), (4, 32)
        x, weight, residual = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes
        )
        with _Operations() as seen:
            y = FusedLinear(weight, None)(x, residual if has_residual else None, out_dtype)
    assert y.dtype == (out_dtype or torch.bfloat16)
    return seen.names, y is residual


def test_a_residual_is_added_in_its_own_memory_by_the_product() -> None:
    assert operations(has_residual=True, out_dtype=None) == (["aten::addmm_"], True)


def test_logits_are_written_once_as_float32() -> None:
    assert operations(has_residual=False, out_dtype=torch.float32) == (["aten::mm.dtype"], False)


@pytest.mark.parametrize("bits", [4, 8])
def test_int_linear_as_a_layer(bits: int) -> None:
    levels = torch.randint(0, 1 << bits, (5, 64), generator=torch.Generator().manual_seed(0))
    scales = randn(5, 2).abs()
    weight = pack_int_weight(levels.to(torch.uint8), scales, None, bits)
    layer = IntLinear(weight, randn(5, seed=1))
    assert (layer.num_in, layer.num_out) == (64, 5)
    x, residual = randn(3, 64, seed=2), randn(3, 5, seed=3)
    wide = (levels.view(5, 2, 32) - (1 << (bits - 1))) * scales[..., None]
    wanted = x @ wide.view(5, 64).t() + randn(5, seed=1) + residual
    torch.testing.assert_close(layer(x, residual), wanted, rtol=1e-4, atol=1e-3)
