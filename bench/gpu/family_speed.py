"""Decode steps of families with other layers than Llama's, at published shapes with few layers and
random weights: experts, latent attention, windows with sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from bench.gpu.engine_speed import BLOCK_SIZE, Model
from bench.gpu.graph_speed import Replayed, replayed_step
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting, time_eager_ms
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.memory_plan import num_linear_weights

_TINY = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
_TINY_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
_TINY_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}

#: By name: config.json of the real shapes, where they are not the family's defaults, and what a dry
#: run has instead.
SHAPES: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    "experts of Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 6, "head_dim": 128},
        {**_TINY, **_TINY_EXPERTS, "moe_intermediate_size": 48, "head_dim": 16},
    ),
    "latent attention of DeepSeek-V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 4},
        {**_TINY, **_TINY_LATENT, "v_head_dim": 16, "q_lora_rank": None},
    ),
    "windows and sinks of gpt-oss-20b": (
        {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 32},
        {**_TINY, **_TINY_EXPERTS, "head_dim": 16, "sliding_window": 16},
    ),
}


def _config(name: str, setting: Setting) -> ModelConfig:
    real, tiny = SHAPES[name]
    if setting.is_dry:
        return parse_config({**real, **tiny, "num_hidden_layers": 2, "first_k_dense_replace": 2})
    return parse_config({**real, "num_hidden_layers": 2} if setting.is_rehearsal else real)


def _num_read(config: ModelConfig, num_seqs: int) -> int:
    """Expected number of weights that a step reads, without the output layer: of experts those that
    some sequence chooses, if all are equally likely."""
    weights, experts = num_linear_weights(config), config.traits.experts
    if experts is None:
        return weights
    of_experts = 3 * sum(experts.layers) * config.hidden_size * experts.intermediate_size
    of_experts *= experts.num_experts
    missed = (1 - experts.num_chosen / experts.num_experts) ** num_seqs
    return weights - int(of_experts * missed)


def _decode(name: str, num_seqs: int, setting: Setting) -> Result:
    """Sequences of 1K tokens. ms: a replay; eager_ms: the step launched by Python; engine_ms:
    Engine.forward."""
    config, num_seqs = _config(name, setting), setting.pick(num_seqs, 2)
    cached, max_len = setting.pick(1023, 20), setting.pick(2048, 64)
    with on_kernels(setting):
        model = Model(setting, config, num_seqs * -(-(cached + 1) // BLOCK_SIZE))
        found = Replayed(setting, model, model.decoder, num_seqs, max_len)
        batch = model.batch(num_seqs, cached, 1)
        replayed, eager = replayed_step(found, batch)
        row_bytes = model.kv.tensor.element_size() * config.num_kv_heads * config.head_dim
        token_bytes = config.num_layers * model.kv.layout.num_parts * row_bytes
        num_weights = _num_read(config, num_seqs) + config.hidden_size * config.vocab_size
        return {
            "ms": time_eager_ms(replayed.replay, setting),
            "eager_ms": time_eager_ms(eager, setting),
            "engine_ms": time_eager_ms(lambda: found.engine.forward(batch), setting),
            "bytes": 2.0 * num_weights + float(num_seqs * (cached + 1) * token_bytes),
        }


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    f"engine decode {num_seqs} x 1K, {name}": partial(_decode, name, num_seqs)
    for name in SHAPES
    for num_seqs in (1, 64)
}
