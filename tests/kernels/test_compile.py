"""Every kernel compiles, for each GPU generation, into something that fits there. No GPU is
needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from baton_kernels.experts import GroupedLinear
from baton_kernels.gpu.experts import grouped_linear
from baton_kernels.gpu.paged_attention import plan_attention
from baton_kernels.linear import PlainLinear
from baton_kernels.paged_attention import AttentionSlice, PlacedTables
from bench.gpu.case import TINY, Case
from bench.gpu.cases import all_cases
from bench.gpu.compile import ARCHS, MAX_SHARED_BYTES, compile_case

pytestmark = pytest.mark.slow

#: A few registers spilled at the edges of a loop; more than that costs more than anything tuned
#: here gains.
MAX_STACK_BYTES = 64


#: The others are long: minutes of compiling what is seldom changed for one of them alone.
REFERENCE_ARCH = 90
#: Not on the others, where they are more of the same: softcap and slopes take more registers than
#: no rule or a window does, head_dim 64 and 256 bound the tiles of 80, and float16 is multiplied as
#: bfloat16 is.
ONLY_THERE = {
    "attention bf16",
    "attention bf16 window",
    "attention bf16 head_dim 80",
    "attention fp16",
}
#: Further variants of a kernel are long on every arch. The remaining ones bound them: head_dim 256
#: has the largest tiles, softcap and slopes take the most registers, fp8 and sinks with a window
#: have the code that the others lack.
VARIANTS = ONLY_THERE | {
    "attention int8",
    "attention fp32",
    "attention latent few heads",
    "attention latent fp32",
    "attention latent int8",
    "attention bf16 head_dim 64 block 64",
    *(f"linear {weight} 40 rows" for weight in ("fp8", "int8", "int4")),
}
COMPILED = [
    pytest.param(
        case,
        arch,
        id=f"{case.name}-{arch}",
        marks=pytest.mark.long if arch != REFERENCE_ARCH or case.name in VARIANTS else (),
    )
    for case in all_cases()
    for arch in ARCHS
    if arch >= case.min_arch and (arch == REFERENCE_ARCH or case.name not in ONLY_THERE)
]


#: Kernels that read weights or KV, and their loads of 1 or 2 bytes: of scales, zeros and biases,
#: once a step, and of a residual.
NARROW_LOADS = {
    "_attend": 0,
    "_attend_latent": 0,
    "_grouped_linear": 0,
    "_grouped_int_linear": 1,
    "_grouped_mxfp4_linear": 0,
    "_int_linear": 2,
    "_fp8_linear": 0,
    "_fixed_linear": 33,
}
#: Their codes become 16-bit ones on the way to a product, which bounds a copy to 8 of them.
EIGHT_AT_A_TIME = {"attention latent int8", "attention latent fp8"}


def test_what_is_named_here_is_among_the_cases() -> None:
    assert {case.name for case in all_cases()} > VARIANTS


@pytest.mark.parametrize(("case", "arch"), COMPILED)
def test_compiles(case: Case, arch: int) -> None:
    trial = case.build(torch.Generator().manual_seed(0), TINY)
    compiled = compile_case(trial.run, arch)
    assert compiled
    for kernel in compiled:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[arch]
        assert kernel.stack_bytes <= MAX_STACK_BYTES, kernel
        if arch == REFERENCE_ARCH and kernel.kernel in NARROW_LOADS:
            assert kernel.num_narrow_loads <= NARROW_LOADS[kernel.kernel], kernel
            assert max(kernel.async_bytes) == (8 if case.name in EIGHT_AT_A_TIME else 16), kernel


@pytest.mark.parametrize("is_split", [False, True])
def test_mixed_steps_of_any_number_of_sequences_plan_by_one_variant(is_split: bool) -> None:
    """Their first tokens, block tables and items begin anywhere in 16 bytes. The number's power of
    two is a constant of the kernel."""
    pool = torch.empty(1, 1, 2, 1, 16, 64, dtype=torch.bfloat16)
    entries = torch.empty(64, dtype=torch.int32)
    start = 20_000 if is_split else 3

    def plan_all() -> None:
        for num_seqs in range(9, 17):
            slices = [AttentionSlice(row, 1, start, range(1)) for row in range(num_seqs)]
            placed = PlacedTables(entries, list(range(num_seqs)))
            plan_attention(slices, pool, 4, 1.0, None, placed=placed)

    assert [kernel.kernel for kernel in compile_case(plan_all, REFERENCE_ARCH)] == ["_plan_items"]


def test_experts_compile_once_for_every_number_of_rows() -> None:
    """In service the numbers of rows are any."""
    layers = [PlainLinear(weight, None) for weight in torch.randn(4, 64, 64).bfloat16()]
    experts = GroupedLinear(layers)

    def run_all() -> None:
        for num_tokens in (1, 5, 16):
            chosen = torch.zeros(num_tokens, 1, dtype=torch.int32)
            grouped_linear(torch.zeros(num_tokens, 64).bfloat16(), chosen, experts, 1)

    names = [kernel.kernel for kernel in compile_case(run_all, REFERENCE_ARCH)]
    assert sorted(names) == ["_grouped_linear", "_order_rows"]
