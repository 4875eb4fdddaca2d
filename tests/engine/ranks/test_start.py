"""What ranks cannot share is refused before any of them starts."""

from __future__ import annotations

import pytest
import torch

from baton.errors import ConfigError
from engine.families.read import read_config
from engine.ranks.mesh import Degrees
from engine.ranks.start import check_ranks
from tests.support.rank_specs import BOX


@pytest.mark.parametrize(
    ("degrees", "device", "told"),
    [
        (Degrees(pipeline=99), "cpu", r"pipeline_parallel_size=99: the model has \d+ layers"),
        (Degrees(pipeline=2, context=3), "cpu", "context_parallel_size=3: stages .* leave one"),
        (Degrees(2, whole_experts=True), "cpu", "enable_expert_parallel=True: .* has no experts"),
        (Degrees(3), "cpu", "tensor_parallel_size=3: num_heads=8 is no multiple"),
        (Degrees(pipeline=2), "cuda", "pipeline_parallel_size=2: ranks reach each other's KV"),
        (Degrees(2), "cuda", "tensor_parallel_size=2: ranks reach each other's KV in host memory"),
    ],
)
def test_each_degree_is_refused_by_its_option(degrees: Degrees, device: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_ranks(read_config(BOX), degrees, torch.device(device))
