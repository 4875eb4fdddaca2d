"""Decode steps of a model that has layers with a state, which transformers' code runs. Shapes: ten
layers of Granite 4.0 H Micro, of which one attends. Weights are random."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from baton.types import Sampling
from bench.gpu.engine_speed import BLOCK_SIZE
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting, time_eager_ms
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice, StepLimits
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.groups.state import STATE
from engine.load import load_engine
from engine.torch.engine import TorchEngine

_SHAPES: Mapping[str, Any] = {
    "vocab_size": 100352,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "shared_intermediate_size": 8192,
    "num_local_experts": 0,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
_TINY: Mapping[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
}


def _write_model(folder: Path, setting: Setting) -> None:
    """A checkpoint as transformers saves one."""
    # Imported here: it takes seconds.
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = ["mamba", "attention"] if setting.is_dry else [*["mamba"] * 9, "attention"]
    if setting.is_rehearsal:
        kinds = kinds[-2:]
    settings: dict[str, Any] = {
        **_SHAPES,
        **(_TINY if setting.is_dry else {}),
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    config = AutoConfig.for_model("granitemoehybrid", **settings)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(setting.device):
        model = make(config, dtype=torch.float32 if setting.is_dry else torch.bfloat16)
    model.save_pretrained(folder)


def _load(setting: Setting, num_seqs: int, num_tokens: int) -> TorchEngine:
    """An engine for num_seqs sequences of num_tokens each."""
    num_blocks = num_seqs * -(-num_tokens // BLOCK_SIZE)
    with tempfile.TemporaryDirectory() as name:
        _write_model(Path(name), setting)
        return load_engine(
            EngineConfig(
                ModelChoice(name, implementation="transformers", max_model_len=num_tokens),
                CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
                StepLimits(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens),
                DeviceConfig(device=setting.device.type),
            ),
            lambda _: None,
            lambda _: None,
        )


def _decode(setting: Setting) -> Result:
    """16 sequences of 1K tokens. ms: Engine.forward of all; one_ms: of one; prompt_ms: of its
    prompt; state_mib: of a sequence's states."""
    num_seqs, num_tokens = setting.pick(16, 2), setting.pick(1024, 6)
    greedy = Sampling(temperature=0.0)
    width = -(-num_tokens // BLOCK_SIZE)
    tokens = [(7 * i) % 60 for i in range(num_tokens)]

    def part(index: int, start: int, end: int) -> SequenceSlice:
        row = SampleRow(end - start - 1, greedy, tokens[:end], num_tokens)
        blocks = range(index * width, (index + 1) * width)
        return SequenceSlice(tokens[start:end], start, blocks, (row,), num_tokens)

    with on_kernels(setting):
        engine = _load(setting, num_seqs, num_tokens)
        # A sequence's first block says which slot its states are in.
        for index in range(num_seqs):
            engine.kv.slot_tables[STATE].of_block[index * width] = index
        prompts = [Batch((part(index, 0, num_tokens - 1),)) for index in range(num_seqs)]
        for prompt in prompts[:-1]:
            engine.forward(prompt)
        # A step may be run again from the same states.
        parts = [part(index, num_tokens - 1, num_tokens) for index in range(num_seqs)]
        prompt_ms = time_eager_ms(lambda: engine.forward(prompts[-1]), setting)
        found: dict[str, float | str] = {
            "ms": time_eager_ms(lambda: engine.forward(Batch(tuple(parts))), setting),
            "one_ms": time_eager_ms(lambda: engine.forward(Batch((parts[0],))), setting),
            "prompt_ms": prompt_ms,
            "state_mib": engine.spec.layout.num_state_layers
            * engine.spec.layout.state_layer_bytes
            / 2**20,
        }
        engine.close()
    return found


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "engine decode 16 x 1K, states of Granite 4.0 H Micro": _decode
}
