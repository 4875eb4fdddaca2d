"""Products by each row's own expert are the experts' own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton_kernels.experts import GroupedLinear
from baton_kernels.experts import grouped_linear as op
from baton_kernels.gpu.experts import grouped_linear, route
from baton_kernels.layer import Routing
from baton_kernels.linear import PlainLinear
from baton_kernels.mxfp4_linear import Mxfp4Linear, pack_mxfp4
from baton_kernels.quantized_linear import Float8Linear, IntLinear, pack_int_weight
from baton_kernels.stacked_weights import IntStack
from bench.gpu.case import TINY, Case
from bench.gpu.cases import all_cases


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "repeat"),
    [(1, 1, 1), (1, 40, 3), (3, 1, 3), (3, 5, 1), (3, 40, 1), (12, 1, 1), (12, 5, 3), (12, 40, 3)],
)
@pytest.mark.parametrize(("num_in", "num_out"), [(48, 70), (130, 64)])
def test_grouped_linear(
    num_experts: int, num_in: int, num_out: int, num_tokens: int, repeat: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(num_experts, num_out, num_in, generator=generator)
    biases = torch.randn(num_experts, num_out, generator=generator)
    experts = GroupedLinear(
        [PlainLinear(w, b if has_bias else None) for w, b in zip(weights, biases, strict=True)]
    )
    shape = (num_tokens, 3)
    chosen = torch.randint(num_experts, shape, generator=generator, dtype=torch.int32)
    x = torch.randn(chosen.numel() // repeat, num_in, generator=generator)
    got = grouped_linear(x, chosen, experts, repeat)
    torch.testing.assert_close(got, op.twin(x, chosen, experts, repeat), atol=1e-4, rtol=1e-4)


AROUND_PRODUCTS = [
    case for case in all_cases() if case.name.startswith(("route", "order", "combine", "headwise"))
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in AROUND_PRODUCTS])
def test_what_is_around_the_products(case: Case) -> None:
    sizes = replace(TINY, half=torch.float32)  # the interpreter's bfloat16 is wrong
    trial = case.build(torch.Generator().manual_seed(0), sizes)
    assert trial.error(trial.run()) <= trial.tolerance


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_token_whose_logits_are_not_finite_has_experts_that_exist() -> None:
    routing = Routing(6, 2, False, True, 1.0, 1, 1)
    logits = torch.zeros(3, 6)
    logits[0, 4], logits[1] = float("nan"), float("nan")
    chosen, _ = route(logits, None, routing)
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert chosen[2].tolist() == [0, 1]


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize(("num_groups", "group_size"), [(1, 48), (3, 32), (2, 128)])
def test_experts_in_float8(num_groups: int, group_size: int, num_tokens: int) -> None:
    """With numbers that float8 holds exactly, because the interpreter's own rounding to it is wrong
    on a carry."""
    generator = torch.Generator().manual_seed(0)
    num_in, num_out = num_groups * group_size, 70

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator).float()

    experts = GroupedLinear(
        [
            Float8Linear(
                whole(num_out, num_in).to(torch.float8_e4m3fn),
                torch.randn(num_groups, num_out, generator=generator),
                torch.randn(num_out, generator=generator),
            )
            for _ in range(5)
        ]
    )
    chosen = torch.randint(5, (num_tokens, 3), generator=generator, dtype=torch.int32)
    x = whole(num_tokens, num_in)
    x.view(num_tokens, num_groups, -1)[..., 0] = 448.0
    got = grouped_linear(x, chosen, experts, 3)
    torch.testing.assert_close(got, op.twin(x, chosen, experts, 3), atol=1e-1, rtol=1e-5)


def integers(
    generator: torch.Generator, num_groups: int, group_size: int, bits: int, *, has_zeros: bool
) -> IntLinear:
    shape = (70, num_groups * group_size)
    levels = torch.randint(1 << bits, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(70, num_groups, generator=generator)
    zeros = torch.randint(1 << bits, scales.shape, generator=generator) if has_zeros else None
    bias = torch.randn(70, generator=generator)
    return IntLinear(pack_int_weight(levels, scales, zeros, bits), bias)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("num_groups", "group_size"), [(1, 96), (3, 32), (2, 256)])
def test_experts_of_integers(
    num_groups: int, group_size: int, bits: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some have zero points, some have not. Nothing asks the device which experts were chosen."""
    generator = torch.Generator().manual_seed(0)
    experts = GroupedLinear(
        [integers(generator, num_groups, group_size, bits, has_zeros=bool(i % 2)) for i in range(5)]
    )
    chosen = torch.randint(5, (num_tokens, 3), generator=generator, dtype=torch.int32)
    x = torch.randn(num_tokens, num_groups * group_size, generator=generator)
    wanted = op.twin(x, chosen, experts, 3)
    monkeypatch.setattr(op, "twin", None)
    got = grouped_linear(x, chosen, experts, 3)
    torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-4)


def test_experts_of_integers_whose_levels_are_in_the_middle() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = GroupedLinear([integers(generator, 2, 32, 4, has_zeros=False) for _ in range(3)])
    assert isinstance(experts.weights, IntStack)
    assert experts.weights.zeros is None
    chosen = torch.randint(3, (9, 2), generator=generator, dtype=torch.int32)
    x = torch.randn(18, 64, generator=generator)
    got = grouped_linear(x, chosen, experts, 1)
    torch.testing.assert_close(got, op.twin(x, chosen, experts, 1), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("num_in", [32, 96, 128])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_in_mxfp4(
    num_in: int, has_bias: bool, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers of 4 bits, powers far from one, and odd numbers of blocks, beside products with
    the dequantised weights."""
    generator = torch.Generator().manual_seed(0)

    def stored() -> Mxfp4Linear:
        codes = torch.randint(256, (70, num_in // 2), generator=generator, dtype=torch.uint8)
        powers = torch.randint(110, 135, (70, num_in // 32), generator=generator).byte()
        bias = torch.randn(70, generator=generator)
        return pack_mxfp4(codes, powers, bias if has_bias else None)

    layers = [stored() for _ in range(5)]
    experts = GroupedLinear(layers)
    plain = GroupedLinear([PlainLinear(each.dequantize(), each.bias) for each in layers])
    chosen = torch.randint(5, (num_tokens, 3), generator=generator, dtype=torch.int32)
    x = torch.randn(num_tokens, num_in, generator=generator)
    wanted = op.twin(x, chosen, plain, 3)
    torch.testing.assert_close(op.twin(x, chosen, experts, 3), wanted)
    monkeypatch.setattr(op, "twin", None)
    got = grouped_linear(x, chosen, experts, 3)
    torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-4)


def test_experts_of_several_kinds_are_run_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = GroupedLinear(
        [integers(generator, 1, 32, bits, has_zeros=False) for bits in (4, 8, 4)]
    )
    assert experts.weights is None
    chosen = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    x = torch.randn(2, 32, generator=generator)
    torch.testing.assert_close(
        grouped_linear(x, chosen, experts, 2), op.twin(x, chosen, experts, 2)
    )
