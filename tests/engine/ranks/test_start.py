"""What ranks cannot share is refused before any of them starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from engine.config import DeviceConfig
from engine.families.read import read_config
from engine.load import _check_gpus
from engine.ranks.mesh import Degrees
from engine.ranks.nodes import Nodes
from engine.ranks.start import check_ranks
from tests.support.rank_specs import BOX, rank_spec
from tests.support.tiny_models import make_tiny_model


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


def test_ranks_with_one_memory_for_kv_are_refused_on_gpus(tmp_path: Path) -> None:
    config = read_config(make_tiny_model(tmp_path, "qwen3_moe"))
    degrees = Degrees(context=2, by_sequence=True)
    check_ranks(config, degrees, torch.device("cpu"))
    check_ranks(config, Degrees(context=2), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"data_parallel_size=2: .* memory, which GPUs do not"):
        check_ranks(config, degrees, torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "num_nodes", "fits"), [("cuda", 1, True), ("cuda:1", 2, True), ("cuda:1", 1, False)]
)
def test_each_rank_of_a_host_needs_a_gpu(
    device: str, num_nodes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = DeviceConfig(device, degrees=Degrees(4), nodes=Nodes(num_nodes))
    if fits:
        _check_gpus(config, torch.device(device))
        return
    with pytest.raises(
        ConfigError, match=r"device=cuda:1: 4 ranks .* GPUs 1 to 4, and torch sees 4"
    ):
        _check_gpus(config, torch.device(device))
