"""Models and devices of tests of plans: sizes from a config, without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from baton.types import KvLayout
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.kv.groups.window import windows_of
from engine.plan.devices import Device
from engine.plan.model import ModelSizes, native_sizes, native_storage

LLAMA_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
_SMALL: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
#: One of each kind: dense, tied, windowed beside full, windowed alone, experts, latent, levels.
CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {**_SMALL, "model_type": "llama"},
        "tied": {**_SMALL, "model_type": "qwen2", "tie_word_embeddings": True},
        "gemma3": {
            **_SMALL,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
        "mistral": {**_SMALL, "model_type": "mistral", "sliding_window": 32},
        "qwen3_moe": {**_SMALL, **_EXPERTS, "model_type": "qwen3_moe", "head_dim": 16},
        "gpt_oss": {**_SMALL, **_EXPERTS, "model_type": "gpt_oss", "head_dim": 16},
        "deepseek_v3": {**_SMALL, **_EXPERTS, **_LATENT, "model_type": "deepseek_v3"},
        "gptq": {
            **_SMALL,
            "model_type": "llama",
            "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
        },
    }
)
NAMES = st.sampled_from(sorted(CONFIGS))


def sizes_of(raw: Mapping[str, Any], kv_dtype: str = "bfloat16") -> ModelSizes:
    """Sizes of a model, levels kept."""
    config = parse_config(raw)
    return native_sizes(
        config,
        native_storage(config.dtype, config.quantization, keeps_levels=True, has_float8=False),
        layout_of(config, kv_dtype),
        config.derived_max_len,
        config.longest_len,
    )


def layout_of(config: ModelConfig, kv_dtype: str = "bfloat16") -> KvLayout:
    window, layers = windows_of(config.windows)
    layout = KvLayout("", config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype, 16)
    return replace(layout, parts=config.kv_parts, window=window, windowed_layers=layers)


def device_of(read: float = 4.3e12, flops: float = 790e12, memory_bytes: int = 100 << 30) -> Device:
    """By default the rates that were measured on an H200."""
    peaks = {"bfloat16": flops, "float32": flops}
    return Device("test", "cuda", memory_bytes, read, peaks, 450e9, 64e9, 1e-5, "a test")
