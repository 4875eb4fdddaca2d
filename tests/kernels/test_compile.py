"""Every kernel compiles, for each GPU generation, into something that fits there. No GPU is needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu.case import TINY, Case
from bench.gpu.cases import all_cases
from bench.gpu.compile import ARCHS, MAX_SHARED_BYTES, compile_case

pytestmark = pytest.mark.slow

#: A few registers spilled at the edges of a loop; more than that costs more than anything tuned here gains.
MAX_STACK_BYTES = 64


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_compiles(case: Case, arch: int) -> None:
    if arch < case.min_arch:
        pytest.skip(f"needs sm_{case.min_arch}")
    trial = case.build(torch.Generator().manual_seed(0), TINY)
    compiled = compile_case(trial.run, arch)
    assert compiled
    for kernel in compiled:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[arch]
        assert kernel.stack_bytes <= MAX_STACK_BYTES, kernel
