"""Checks that ranks can share a model, and starts them."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.errors import ConfigError
from engine.families.config import ModelConfig
from engine.kv.tensors.ranks import PoolSize
from engine.ranks.followers import Followers, NoFollowers
from engine.ranks.rank_spec import RankSpec, staging_bytes
from engine.ranks.team import RankTeam
from engine.shard import check_size


def check_ranks(config: ModelConfig, size: int, device: torch.device) -> None:
    """Raise ConfigError if `size` ranks cannot share the model on this kind of device."""
    check_size(config, size)
    if size > 1 and device.type != "cpu":
        raise ConfigError.of(
            "tensor_parallel_size",
            size,
            "ranks reach each other's KV in host memory; give --device=cpu, or leave it out",
        )


def start_followers(
    size: int,
    folder: Path,
    config: ModelConfig,
    dtype: str,
    pools: tuple[PoolSize, ...],
    max_model_len: int,
) -> Followers:
    """Start the processes of all other ranks; they load in parallel, each with as many threads as
    this process.

    dtype: of the weights. pools: of each rank.
    """
    if size == 1:
        return NoFollowers()
    spec = RankSpec(
        rank=0,
        size=size,
        folder=str(folder),
        config=config,
        dtype=dtype,
        pools=pools,
        max_model_len=max_model_len,
        num_threads=torch.get_num_threads(),
        staging_bytes=staging_bytes(config, size, dtype),
        kv_fd=-1,
        meeting_fd=-1,
    )
    return RankTeam(spec)
