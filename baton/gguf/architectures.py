"""Architectures of GGUF files: how metadata become config.json, and tensors those of transformers.

What llama.cpp's conversion changed is undone here: rows of queries and keys of a Llama lie in pairs
(`is_interleaved`), and norms of a Gemma have 1 added (`norm_offset`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isclose, pi
from types import MappingProxyType
from typing import Any

from baton.errors import UnsupportedModel
from baton.gguf.reader import GgufFile

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
#: Names of a model's parts outside of layers, and of a layer's parts; unlisted tensors are refused.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Tensors that become part of config.json.
_OF_CONFIG = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")


@dataclass(frozen=True, slots=True)
class Architecture:
    """model_type, model_class: of config.json. parts: names that differ from a Llama's. fields:
    further fields of config.json."""

    model_type: str
    model_class: str
    parts: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False
    norm_offset: float = 0.0
    fields: Callable[[Reading], dict[str, Any]] = lambda _: {}


class Reading:
    """Metadata of a file's architecture, by key without the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Raises UnsupportedModel."""
        value = self.get(key)
        if value is None:
            name = f"{self.file.architecture}.{key}"
            raise UnsupportedModel(f"{self.file.path}: no {name} in it; convert the model again")
        return value

    @property
    def head_dim(self) -> int:
        default = self.need("embedding_length") // self.need("attention.head_count")
        return int(self.get("attention.key_length", self.get("rope.dimension_count", default)))

    def num_paired_heads(self, tensor: str) -> int:
        """Heads of a tensor with rows in pairs; 0 for other tensors."""
        heads = self.need("attention.head_count")
        if ".attn_q." in tensor:
            return int(heads)
        return int(self.get("attention.head_count_kv", heads)) if ".attn_k." in tensor else 0

    @property
    def rope_theta(self) -> float:
        return float(self.get("rope.freq_base", 10000.0))


def architecture_of(file: GgufFile) -> Architecture:
    """Raises UnsupportedModel."""
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture={name!r}: {', '.join(ARCHITECTURES)} are read from "
            "GGUF; use the model's safetensors"
        )
    if Reading(file).get("expert_count"):
        raise UnsupportedModel(
            f"{file.path}: mixtures of experts are not read from GGUF; use the model's safetensors"
        )
    return ARCHITECTURES[name]


def tensor_name(architecture: Architecture, name: str) -> str | None:
    """Transformers' name of a tensor; None for one that is part of config.json. Raises KeyError."""
    if _OF_CONFIG.fullmatch(name):
        return None
    if not (found := _LAYER.fullmatch(name)):
        stem, _, kind = name.rpartition(".")
        return f"{_OUTER[stem]}.{kind}"
    layer, part, kind = found.groups()
    own = architecture.parts.get(part) or _PARTS[part]
    return f"model.layers.{layer}.{own}.{kind}"


def config_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of config.json, except for types of weights. Raises UnsupportedModel."""
    architecture, reading = architecture_of(file), Reading(file)
    heads = reading.need("attention.head_count")
    tokens = file.metadata.get("tokenizer.ggml.tokens") or ()
    embeddings = file.tensors.get("token_embd.weight")
    fields = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "hidden_size": reading.need("embedding_length"),
        "intermediate_size": reading.need("feed_forward_length"),
        "num_hidden_layers": reading.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reading.get("attention.head_count_kv", heads),
        "head_dim": reading.head_dim,
        "max_position_embeddings": reading.need("context_length"),
        "rms_norm_eps": reading.need("attention.layer_norm_rms_epsilon"),
        "vocab_size": embeddings.shape[0] if embeddings else len(tokens),
        "rope_theta": reading.rope_theta,
        "rope_scaling": _rope_scaling(reading),
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
    }
    fields |= architecture.fields(reading)
    for name, value in fields.items():
        if isinstance(value, list) and name.startswith("num_"):
            raise UnsupportedModel(
                f"{file.path}: {name}={value}: one number for all layers is read"
            )
    return fields


def _rope_scaling(reading: Reading) -> dict[str, Any] | None:
    if factors := reading.file.floats("rope_freqs.weight"):
        return _llama3_scaling(reading, factors)
    kind = reading.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": float(reading.need("rope.scaling.factor"))}
    if original := reading.get("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{reading.file.path}: rope.scaling.type={kind!r}: linear and yarn are read"
        )
    return scaling


def _llama3_scaling(reading: Reading, factors: list[float]) -> dict[str, Any]:
    """Llama 3.1's scaling: a GGUF file has its results, here compared with those of the published
    parameters. Raises UnsupportedModel if they differ."""
    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for index, found in enumerate(factors):
        wavelength = 2 * pi * reading.rope_theta ** (index / len(factors))
        smooth = min(1.0, max(0.0, (8192 / wavelength - 1.0) / 3.0))
        wanted = 1 / ((1 - smooth) / max(factors) + smooth)
        if not isclose(found, wanted, rel_tol=1e-3):
            raise UnsupportedModel(
                f"{reading.file.path}: rope_freqs.weight is not Llama 3's; use the model's "
                "safetensors"
            )
    return scaling


def _phi3(reading: Reading) -> dict[str, Any]:
    file, fields = reading.file, {"sliding_window": reading.get("attention.sliding_window") or None}
    rotated = reading.get("rope.dimension_count", reading.head_dim)
    fields["partial_rotary_factor"] = rotated / reading.head_dim
    if long := file.floats("rope_factors_long.weight"):
        original = reading.need("rope.scaling.original_context_length")
        fields["original_max_position_embeddings"] = original
        fields["rope_scaling"] = {
            "type": "longrope",
            "long_factor": long,
            "short_factor": file.floats("rope_factors_short.weight"),
        }
    return fields


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(reading: Reading) -> dict[str, Any]:
    return _GEMMA | {
        "sliding_window": reading.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": reading.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reading.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(reading, num_layers_of_27b=46),
    }


def _gemma3(reading: Reading) -> dict[str, Any]:
    return _GEMMA | {
        "sliding_window": reading.need("attention.sliding_window"),
        "rope_local_base_freq": reading.get("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(reading, num_layers_of_27b=62),
    }


def _query_scalar(reading: Reading, num_layers_of_27b: int) -> int:
    """A file has no such field: llama.cpp knows the 27B models, which divide by the width of all
    heads, by their number of layers."""
    if reading.need("block_count") == num_layers_of_27b:
        return int(reading.need("embedding_length") // reading.need("attention.head_count"))
    return reading.head_dim


#: By general.architecture; Mistral's files say llama.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", "LlamaForCausalLM", is_interleaved=True),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
        "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
        "phi3": Architecture(
            "phi3", "Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}, fields=_phi3
        ),
        "gemma": Architecture(
            "gemma", "GemmaForCausalLM", norm_offset=1.0, fields=lambda _: _GEMMA
        ),
        "gemma2": Architecture(
            "gemma2", "Gemma2ForCausalLM", _GEMMA_PARTS, norm_offset=1.0, fields=_gemma2
        ),
        "gemma3": Architecture(
            "gemma3_text", "Gemma3ForCausalLM", _GEMMA_PARTS, norm_offset=1.0, fields=_gemma3
        ),
    }
)
