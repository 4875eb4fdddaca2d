"""What ranks cannot share is refused before any of them starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.errors import ConfigError
from engine.families.read import read_config
from engine.ranks.mesh import Degrees
from engine.ranks.start import check_ranks
from tests.support.rank_specs import BOX, rank_spec


@pytest.mark.parametrize(
    ("degrees", "device", "told"),
    [
        (Degrees(pipeline=99), "cpu", r"pipeline_parallel_size=99: the model has \d+ layers"),
        (Degrees(pipeline=2, context=3), "cpu", "context_parallel_size=3: stages .* leave one"),
        (Degrees(2, whole_experts=True), "cpu", "enable_expert_parallel=True: .* has no experts"),
        (Degrees(3), "cpu", "tensor_parallel_size=3: num_heads=8 is no multiple"),
    ],
)
def test_each_degree_is_refused_by_its_option(degrees: Degrees, device: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_ranks(read_config(BOX), degrees, torch.device(device))


@pytest.mark.parametrize(
    ("device", "num_nodes", "wanted"),
    [
        ("cpu", 1, ["cpu"] * 4),
        ("cuda", 1, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:4", 2, ["cuda:4", "cuda:5", "cuda:4", "cuda:5"]),
    ],
)
def test_each_rank_of_a_host_has_a_device(device: str, num_nodes: int, wanted: list[str]) -> None:
    spec = rank_spec(Degrees(4), "gloo", device=device, num_nodes=num_nodes)
    assert [str(replace(spec, rank=rank).torch_device) for rank in range(4)] == wanted
