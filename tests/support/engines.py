"""Engines by keywords: a test names the few settings that it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelChoice,
    StepLimits,
)
from engine.cuda.graph_device import GraphDevice
from engine.load import load_engine as load
from engine.memory_plan import MemoryPlan
from engine.model_source import Graphs
from engine.ranks.mesh import Degrees
from engine.torch.engine import TorchEngine
from engine.torch.weights import ProgressHook

#: Settings by the names of a worker's options, where those of the fields are others.
_OPTIONS = {
    "model_impl": "implementation",
    "kv_cache_memory_bytes": "memory_bytes",
    "distributed_backend": "backend",
    "lora_modules": "modules",
}


def load_engine(
    model: str,
    *,
    kv_cache_dtype: str = "auto",
    make_graphs: Callable[[torch.device], GraphDevice] | None = None,
    max_graph_tokens: int = 64,
    on_plan: Callable[[MemoryPlan], None] | None = None,
    progress: ProgressHook | None = None,
    **options: Any,
) -> TorchEngine:
    """An engine of `model`. options: fields of EngineConfig and its parts, or their options."""
    left = {_OPTIONS.get(name, name): value for name, value in options.items()}
    sizes = [left.pop(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline", "context")]
    data = left.pop("data_parallel_size", 1)
    sizes[2] *= data
    left["degrees"] = Degrees(
        *sizes,
        left.pop("enable_expert_parallel", False),
        left.pop("tensor_parallel_cut", "outputs"),
        data > 1,
    )

    def part(kind: type[Any], **more: Any) -> Any:
        names = kind.__slots__
        return kind(**more, **{name: left.pop(name) for name in names if name in left})

    choice = part(ModelChoice, model=model)
    config = EngineConfig(
        choice,
        part(CacheConfig, dtype=kv_cache_dtype),
        part(StepLimits),
        part(DeviceConfig),
        part(LoraConfig),
        Graphs(make_graphs, max_graph_tokens) if make_graphs else None,
        **left,
    )
    return load(config, on_plan, progress)
