"""Decode steps with LoRA adapters on all linear layers of the model of bench.gpu.engine_speed,
beside the same steps without."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.gpu.engine_speed import load_model
from bench.gpu.graph_speed import Replayed
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting, time_eager_ms
from engine.families.config import ModelConfig
from engine.families.layers import describe_layers
from engine.interface import Batch
from engine.torch.adapters import Adapter, load_adapter
from engine.torch.grouped_adapters import group_adapters
from engine.torch.step_adapters import EachAdapter

_RANK = 16


def _write_adapter(folder: Path, config: ModelConfig, generator: torch.Generator) -> None:
    """An adapter as PEFT saves one, of random numbers, on every linear layer."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in describe_layers(config):
        for spec in layer.linears:
            for source in spec.sources:
                shapes = {"A": (_RANK, spec.num_in), "B": (source.num_rows, _RANK)}
                for side, shape in shapes.items():
                    made = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
                    name = f"base_model.model.{source.name}.lora_{side}.weight"
                    tensors[name] = made.normal_(std=0.02, generator=generator).cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
    (folder / "adapter_config.json").write_text(json.dumps(raw))


def _adapters(num: int, config: ModelConfig, setting: Setting) -> dict[str, Adapter]:
    """By name; each with numbers of its own."""
    found, generator = {}, setting.generator()
    for index in range(num):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _write_adapter(folder, config, generator)
            found[str(index)] = load_adapter(folder, config, setting.half, setting.device, _RANK)
    return found


def _decode(num_seqs: int, num_adapters: int, setting: Setting) -> Result:
    """Sequences of 1K tokens, adapters in turn. engine_ms: Engine.forward, as a worker runs it;
    plain_engine_ms: without adapters; adapter_mib: of each adapter."""
    with on_kernels(setting):
        model = load_model(setting)
        num_seqs, num_adapters = setting.pick(num_seqs, 2), setting.pick(num_adapters, 1)
        adapters = _adapters(num_adapters, model.config, setting)
        max_len = setting.pick(2048, 64)
        own = group_adapters(adapters) or EachAdapter(adapters)
        found = Replayed(setting, model, model.decoder, num_seqs, max_len, own)
        plain = model.batch(num_seqs, setting.pick(1023, 20), 1)
        names = list(adapters)
        parts = enumerate(plain.slices)
        adapted = Batch(tuple(p._replace(adapter=names[i % num_adapters]) for i, p in parts))
        return {
            "engine_ms": time_eager_ms(lambda: found.engine.forward(adapted), setting),
            "plain_engine_ms": time_eager_ms(lambda: found.engine.forward(plain), setting),
            "adapter_mib": adapters[names[0]].num_bytes / 2**20,
        }


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "engine decode 64 x 1K, 1 adapter": partial(_decode, 64, 1),
    "engine decode 64 x 1K, 8 adapters": partial(_decode, 64, 8),
}
