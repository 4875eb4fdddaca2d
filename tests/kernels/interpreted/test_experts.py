"""Products by each row's own expert are the experts' own."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.experts import GroupedLinear
from baton_kernels.experts import grouped_linear as op
from baton_kernels.gpu.experts import grouped_linear
from baton_kernels.linear import PlainLinear


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
