"""Checks that ranks can share a model, and starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from baton.errors import ConfigError
from engine.families.config import ModelConfig
from engine.kv.tensors.ranks import PoolSize
from engine.ranks.followers import Followers, NoFollowers
from engine.ranks.mesh import Degrees
from engine.ranks.nodes import ONE_NODE, Nodes
from engine.ranks.rank_spec import ForeignConfig, RankSpec
from engine.ranks.team import RankTeam
from engine.shard import check_size


def check_ranks(config: ModelConfig, degrees: Degrees, device: torch.device) -> None:
    """Raise ConfigError if ranks of these degrees cannot share the model on this kind of device."""
    check_size(
        config,
        degrees.tensor,
        has_whole_experts=degrees.whole_experts,
        cut=degrees.cut,
        is_packed=device.type == "cuda",
    )
    if degrees.pipeline > config.num_layers:
        raise ConfigError.of(
            "pipeline_parallel_size",
            degrees.pipeline,
            f"the model has {config.num_layers} layers, and each stage needs one; use "
            f"1 to {config.num_layers}",
        )
    if degrees.by_sequence:
        _check_own_sequences(config, degrees)
    elif degrees.context > 1 and degrees.pipeline > 1:
        raise ConfigError.of(
            "context_parallel_size",
            degrees.context,
            f"stages (pipeline_parallel_size={degrees.pipeline}) have no contexts yet; leave one "
            "of them out",
        )
    if degrees.whole_experts and config.traits.experts is None:
        raise ConfigError.of(
            "enable_expert_parallel",
            True,
            f"a {config.family} model of this config has no experts; leave it out",
        )
    if degrees.by_sequence and device.type != "cpu":
        raise ConfigError.of(
            degrees.context_option,
            degrees.context,
            "its ranks have one KV memory, which GPUs do not share; give --device=cpu, or leave it "
            "out",
        )


def _check_own_sequences(config: ModelConfig, degrees: Degrees) -> None:
    """Raise ConfigError unless ranks with sequences of their own can share the experts."""
    name, size, experts = degrees.context_option, degrees.context, config.traits.experts
    if experts is None:
        fix = f"a {config.family} model of this config has no experts to share; leave it out"
        raise ConfigError.of(name, size, fix)
    if experts.num_experts % size:
        fix = f"num_experts={experts.num_experts} is no multiple of it; give a divisor of that"
        raise ConfigError.of(name, size, fix)


def start_followers(
    degrees: Degrees,
    backend: str,
    folder: Path,
    config: ModelConfig | ForeignConfig,
    dtype: str,
    pools: tuple[PoolSize, ...],
    max_num_rows: int,
    nodes: Nodes = ONE_NODE,
    **more: Any,
) -> Followers:
    """Start the processes of all other ranks; they load in parallel, each with as many threads as
    this process.

    backend: a name of BACKENDS. dtype: of the weights. max_num_rows, more: fields of RankSpec.
    """
    if degrees.num_ranks == 1:
        return NoFollowers()
    spec = RankSpec(
        rank=0,
        degrees=degrees,
        backend=backend,
        folder=str(folder),
        config=config,
        dtype=dtype,
        pools=pools,
        num_threads=torch.get_num_threads(),
        max_num_rows=max_num_rows,
        num_nodes=nodes.size,
        **more,
    )
    return RankTeam(spec, nodes)
