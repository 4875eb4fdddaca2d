"""Backends: how the ranks of an engine exchange results, by the name of --distributed-backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from baton.errors import ConfigError
from engine.ranks.exchange import Groups
from engine.ranks.process_groups import ProcessGroups
from engine.ranks.rank_spec import RankSpec
from engine.ranks.shared_ranks import SharedMemory
from engine.ranks.stages import Stages

AUTO = "auto"


class Backend(Protocol):
    """What the ranks of one engine meet by. Each rank has its own object."""

    def open(self, spec: RankSpec) -> RankSpec:
        """On rank 0, before the other ranks start: make what the ranks meet by. Returns the spec
        that names it. Raises OSError."""
        ...

    def join(self, spec: RankSpec) -> Groups:
        """On each rank, once all have loaded: the rank's groups. Waits until all their ranks have
        joined. Raises StartupError."""
        ...

    def stages(self, spec: RankSpec) -> Stages:
        """On each rank, after `join`: the rank's links to the stages before and after it. Raises
        StartupError."""
        ...


BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "shm": SharedMemory,
    "gloo": partial(ProcessGroups, "gloo"),
    "nccl": partial(ProcessGroups, "nccl"),
}


def choose_backend(name: str, device: torch.device, num_nodes: int = 1) -> str:
    """The backend for ranks on this kind of device, of so many hosts; `auto` takes the fastest.
    Raises ConfigError."""
    fitting = ["shm", "gloo"] if device.type == "cpu" else ["nccl", "gloo"]
    if num_nodes > 1:
        fitting = [each for each in fitting if each != "shm"]
    if name == AUTO:
        return fitting[0]
    if name not in fitting:
        use = " or ".join((AUTO, *fitting))
        where = device.type if num_nodes == 1 else f"{device.type} and {num_nodes} hosts"
        raise ConfigError.of("distributed_backend", name, f"on {where} use {use}")
    return name
