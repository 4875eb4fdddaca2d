"""Tiny random checkpoints of transformers' decoders, by architecture: as many kinds of norm,
position, attention and mixture as there are names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 96

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
#: Fields of configs with GPT-2's names.
_OLD_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
}
_GROUPED: Mapping[str, Any] = {**_SHAPE, "num_key_value_heads": 2}
_WIDE: Mapping[str, Any] = {**_GROUPED, "head_dim": 32}
_EXPERTS: Mapping[str, Any] = {
    **_GROUPED,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_WINDOW: Mapping[str, Any] = {"sliding_window": 8}
#: The last two of four layers read the KV of the first two.
_SHARED: Mapping[str, Any] = {
    **_WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
#: One layer in four, or in two, sees all.
_MIXED: Mapping[str, Any] = {**_WINDOW, "num_hidden_layers": 4}

#: One layer in four attends; the others keep a state.
_MAMBA: Mapping[str, Any] = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_DELTA: Mapping[str, Any] = {
    **_EXPERTS,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 64,
}
_ONE_IN_FOUR = ["linear_attention"] * 2 + ["full_attention", "linear_attention"]

#: By name: what it is made of. "model_type" is the name where it is left out.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**_EXPERTS, **_MIXED, "head_dim": 16},
    "apertus": _GROUPED,
    "apertus1p5_text": {**_GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "arcee": _GROUPED,
    "biogpt": _SHAPE,
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
    "bitnet": _GROUPED,
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "codegen": {**_OLD_SHAPE, "rotary_dim": 8, "n_ctx": 256},
    "cohere": {**_GROUPED, "logit_scale": 0.25},
    "cohere2": {**_GROUPED, **_MIXED},
    "ctrl": {**_OLD_SHAPE, "dff": 128},
    "dbrx": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {
        **_EXPERTS,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "ernie4_5": {**_GROUPED, "head_dim": 16},
    "exaone": _GROUPED,
    "exaone4": {**_GROUPED, **_MIXED},
    "falcon": {**_SHAPE, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_alibi": {
        **_SHAPE,
        "model_type": "falcon",
        "alibi": True,
        "multi_query": False,
        "new_decoder_architecture": False,
    },
    "falcon_h1": {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128},
    "gemma": _WIDE,
    "gemma2": {**_WIDE, **_WINDOW, "query_pre_attn_scalar": 32},
    "gemma3_text": {**_WIDE, **_WINDOW, "num_hidden_layers": 6, "query_pre_attn_scalar": 32},
    "gemma3n_text": {
        **_WIDE,
        **_SHARED,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**_WIDE, **_SHARED, "global_head_dim": 32},
    "glm": {**_GROUPED, "head_dim": 16},
    "glm4": {**_GROUPED, "head_dim": 16},
    "glm4_moe": {**_EXPERTS, "head_dim": 16, "first_k_dense_replace": 1},
    "gpt2": _OLD_SHAPE,
    "gpt_bigcode": _OLD_SHAPE,
    "gpt_neo": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "window_size": 8,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {**_SHAPE, "rotary_pct": 0.5},
    "gpt_oss": {**_EXPERTS, **_WINDOW, "head_dim": 32},
    "gptj": {**_OLD_SHAPE, "rotary_dim": 8},
    "granite": {
        **_GROUPED,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
    },
    "granitemoe": _EXPERTS,
    "granitemoehybrid": {**_MAMBA, **_EXPERTS, "num_hidden_layers": 4, "layer_types": _ONE_IN_FOUR},
    "helium": {**_GROUPED, "head_dim": 16},
    "hunyuan_v1_dense": {**_GROUPED, "head_dim": 16},
    "jamba": {
        **_GROUPED,
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "lara_mini": {**_DELTA, "layer_types": _ONE_IN_FOUR},
    "lfm2": {**_GROUPED, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "llama": _GROUPED,
    "minimax_m2": {**_EXPERTS, "head_dim": 16},
    "mixtral": _EXPERTS,
    "mpt": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 256,
        "expansion_ratio": 2,
    },
    "nanochat": _GROUPED,
    "nemotron": _GROUPED,
    "olmo": {**_GROUPED, "clip_qkv": 0.5},
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, **_MIXED},
    "olmo_hybrid": {**_DELTA, "layer_types": _ONE_IN_FOUR},
    "olmoe": _EXPERTS,
    "opt": {**_SHAPE, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": _SHAPE,
    "phi": _GROUPED,
    "phi3": {**_GROUPED, **_WINDOW},
    "phimoe": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": {**_DELTA, "layer_types": _ONE_IN_FOUR},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_DELTA, "layer_types": _ONE_IN_FOUR},
    "sarvam_moe": {**_EXPERTS, "head_dim": 16, "first_k_dense_replace": 1},
    "seed_oss": {**_GROUPED, "head_dim": 16},
    "smollm3": {**_GROUPED, "num_hidden_layers": 4},
    "stablelm": _GROUPED,
    "starcoder2": {**_GROUPED, **_WINDOW},
    "vaultgemma": {**_WIDE, **_WINDOW, "query_pre_attn_scalar": 32},
    "xglm": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "ffn_dim": 128,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 256,
    },
}

#: What cannot be served, and a word of the reason.
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "bert": (_SHAPE, "later tokens"),
    "deepseek_v3": ({**_EXPERTS, "kv_lora_rank": 16}, "latent attention"),
    "diffllama": (_GROUPED, "more than once"),
    "doge": (_GROUPED, "mask of its own"),
    "llama4_text": (_GROUPED, "chunked_attention"),
    "mamba": ({"vocab_size": VOCAB_SIZE, "hidden_size": 64}, "or none"),
    "openai-gpt": (_OLD_SHAPE, "attention of its own"),
    "rwkv": ({"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2}, "attention"),
    "t5": ({"vocab_size": VOCAB_SIZE}, "an encoder and a decoder"),
}


def model_type(name: str) -> str:
    """model_type of an entry of ARCHITECTURES."""
    return str(ARCHITECTURES[name].get("model_type", name))


def make_checkpoint(path: Path, name: str, **changes: Any) -> Path:
    """Write an architecture's checkpoint into `path`. Every tensor is random, and wide enough that
    greedy outputs vary; no token ends them. changes: to its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {**ARCHITECTURES[name], **changes}
    settings = {key: value for key, value in known.items() if key != "model_type"}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(model_type(name), **settings, **tokens)
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config).float()
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = any(part in parameter_name.lower() for part in ("norm", "ln_", ".ln"))
        if parameter.dim() > 1:
            noise *= 2.0 * min(parameter.shape[-2:]) ** -0.5
        elif is_norm and parameter_name.endswith("weight"):
            noise = 1 + 0.2 * noise
        else:
            noise *= 0.2
        parameter.data.copy_(noise)
    model.save_pretrained(path)
    return path


def write_config(path: Path, name: str) -> Path:
    """Write the config.json of an architecture of REFUSED into `path`."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **REFUSED[name][0])
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return path
