"""Mixtures of experts in native code give what their twins give, read no expert that nobody goes
to, and give a row the same in any batch."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.cpu.linear import NativeLinear
from baton_kernels.experts import GroupedLinear, combine, grouped_linear, route
from baton_kernels.layer import Routing
from baton_kernels.linear import pack_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_EXPERTS, NUM_IN, NUM_OUT = 12, 48, 70

ROUTINGS = {
    "softmax": Routing(NUM_EXPERTS, 3, False, True, 1.0, 1, 1),
    "softmax, as it is": Routing(NUM_EXPERTS, 2, False, False, 1.0, 1, 1),
    "sigmoid": Routing(NUM_EXPERTS, 4, True, True, 2.5, 1, 1),
    "groups": Routing(NUM_EXPERTS, 4, True, True, 1.0, 4, 2),
    "groups by their largest": Routing(NUM_EXPERTS, 4, False, False, 1.0, 4, 2, 1),
    "groups of one": Routing(NUM_EXPERTS, 3, False, True, 1.0, 12, 5),
    "all": Routing(NUM_EXPERTS, NUM_EXPERTS, False, True, 1.0, 1, 1),
}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def experts_of(generator: torch.Generator, dtype: torch.dtype) -> GroupedLinear:
    shape = (NUM_EXPERTS, NUM_OUT, NUM_IN)
    weights = torch.randn(shape, generator=generator).to(dtype)
    return GroupedLinear([pack_linear(weight, None) for weight in weights])


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(generator: torch.Generator, name: str, has_bias: bool) -> None:
    logits = torch.randn(40, NUM_EXPERTS, generator=generator) * 3
    bias = torch.randn(NUM_EXPERTS, generator=generator) if has_bias else None
    chosen, weights = route(logits, bias, ROUTINGS[name])
    wanted, wanted_weights = route.twin(logits, bias, ROUTINGS[name])
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, wanted_weights)


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.zeros(1, NUM_EXPERTS)
    routing = ROUTINGS["softmax"]
    for chosen, weights in (route(logits, None, routing), route.twin(logits, None, routing)):
        assert chosen.tolist() == [[0, 1, 2]]
        torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeat", [1, 3])
def test_a_row_s_product_is_its_expert_s_alone(
    generator: torch.Generator, dtype: torch.dtype, repeat: int
) -> None:
    experts = experts_of(generator, dtype)
    chosen = torch.randint(NUM_EXPERTS, (20, 3), generator=generator, dtype=torch.int32)
    x = torch.randn(60 // repeat, NUM_IN, generator=generator).to(dtype)
    got = grouped_linear(x, chosen, experts, repeat)
    for row, expert in enumerate(chosen.flatten().tolist()):
        alone = experts.linears[expert](x[row // repeat : row // repeat + 1])
        assert torch.equal(got[row], alone[0])


def test_no_expert_is_read_that_nobody_goes_to(generator: torch.Generator) -> None:
    experts = experts_of(generator, torch.bfloat16)
    for expert in (0, 3, 11):
        linear = experts.linears[expert]
        assert isinstance(linear, NativeLinear)
        linear._call.data = None  # reading it would end the process
    chosen = torch.tensor([[1, 2], [2, 10], [4, 5]], dtype=torch.int32)
    x = torch.randn(3, NUM_IN, generator=generator).bfloat16()
    assert torch.isfinite(grouped_linear(x, chosen, experts, 2)).all()


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_more", [False, True])
def test_combine_to_the_bit(generator: torch.Generator, dtype: torch.dtype, has_more: bool) -> None:
    parts, more = (torch.randn(33, 50, generator=generator).to(dtype) for _ in range(2))
    weights = torch.rand(11, 3, generator=generator)
    shared, residual = (more[:11], more[11:22]) if has_more else (None, None)
    got = combine(parts, weights, shared, residual)
    assert torch.equal(got, combine.twin(parts, weights, shared, residual))


def test_no_token_at_all(generator: torch.Generator) -> None:
    experts = experts_of(generator, torch.float32)
    chosen, weights = route(torch.zeros(0, NUM_EXPERTS), None, ROUTINGS["softmax"])
    parts = grouped_linear(torch.zeros(0, NUM_IN), chosen, experts, 3)
    assert combine(parts, weights, None, None).shape == (0, NUM_OUT)
    chosen, weights = route.twin(torch.zeros(0, NUM_EXPERTS), None, ROUTINGS["groups"])
    parts = grouped_linear.twin(torch.zeros(0, NUM_IN), chosen, experts, 4)
    assert combine.twin(parts, weights, None, None).shape == (0, NUM_OUT)
