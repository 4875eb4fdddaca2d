"""All items of the benchmark in their order: correctness before speed, and the most important
first.

Each stage runs in a process of its own, so that the GPU's memory is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from bench.gpu import (
    adapter_speed,
    ahead_speed,
    attention_speed,
    checks,
    engine_speed,
    family_speed,
    graph_speed,
    kv_speed,
    linear_speed,
    op_speed,
    peers,
    roofs,
    sanitizer,
    service_speed,
    shared_device,
    state_speed,
)
from bench.gpu.setting import Result, Setting

Items = Mapping[str, Callable[[Setting], Result]]

_ROOFS: Items = {"roof copy": roofs.copy_roof, "roof matmul": roofs.matmul_roof}
_OF_ALL: Items = {
    **checks.ITEMS,
    **engine_speed.ITEMS,
    **graph_speed.ITEMS,
    **ahead_speed.CHECKS,
    **linear_speed.ITEMS,
}
_CHECKS: Items = {name: item for name, item in _OF_ALL.items() if name.startswith("check ")}
_STEPS: Items = {
    **graph_speed.ITEMS,
    **engine_speed.ITEMS,
    **ahead_speed.ITEMS,
    **family_speed.ITEMS,
    **adapter_speed.ITEMS,
    **state_speed.ITEMS,
    **peers.ITEMS,
}
_KERNELS: Items = {**attention_speed.ITEMS, **op_speed.ITEMS, **linear_speed.ITEMS}

STAGES: Mapping[str, Items] = {
    "checks": {**_CHECKS, "attention invariance": attention_speed.invariance, **sanitizer.ITEMS},
    "roofs": _ROOFS,
    "engine": {name: item for name, item in _STEPS.items() if name not in _CHECKS},
    "peers": {**attention_speed.PEERS, **peers.OTHERS},
    "kv": {**kv_speed.ITEMS, **shared_device.ITEMS},
    "service": service_speed.ITEMS,
    "kernels": {name: item for name, item in _KERNELS.items() if name not in _CHECKS},
    "tiles": attention_speed.TILES,
}

ITEMS: Items = {name: item for items in STAGES.values() for name, item in items.items()}

#: Time limits in seconds of items that may exceed the default.
LIMITS_S: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(service_speed.ITEMS, service_speed.LIMIT_S),
        **dict.fromkeys(sanitizer.ITEMS, sanitizer.LIMIT_S),
    }
)


def rehearsal_groups(stages: Sequence[str], num_processes: int) -> list[list[str]]:
    """Split the items of these stages that compile kernels over processes; those with a whole model
    share one process, to fit in memory."""
    engine = [name for name in STAGES["engine"] if name in _wanted(stages)]
    engine += [name for name in _CHECKS if "graphs" in name and name in _wanted(stages)]
    others = [
        name
        for stage in ("checks", "kernels", "kv", "tiles")
        if stage in stages
        for name in STAGES[stage]
        if name not in engine and name not in {**sanitizer.ITEMS, **shared_device.ITEMS}
    ]
    num_others = max(1, num_processes - 1)
    groups = [engine, *(others[i::num_others] for i in range(num_others))]
    return [group for group in groups if group]


def _wanted(stages: Sequence[str]) -> set[str]:
    return {name for stage in stages for name in STAGES[stage]}
