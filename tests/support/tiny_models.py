"""Random small checkpoints, as Hugging Face would save them, for tests. Nothing here was
trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "phi3",
    "olmo2",
    "deepseek_v2",
    "deepseek_v3",
]

_CLASSES: dict[Family, tuple[str, str]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
#: What the default of a family would make too large, or unlike what tests need.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
    },
    "gemma": {"pad_token_id": 0},
    "gemma2": {"pad_token_id": 0},
    "gemma3_text": {"pad_token_id": 0},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "phi3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
}

#: The tokenizer's ids: 256 bytes, then these.
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
NUM_TOKENIZER_IDS = 259

_SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": NUM_TOKENIZER_IDS,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": None,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    path: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random model of `family` with config.json, safetensors, tokenizer.json and chat
    template into `path`.

    `overrides` are fields of the family's transformers config. Every tensor is random, norms and
    biases too, and wide enough that greedy outputs vary. The tokenizer maps each byte to its own
    id; it is left out where vocab_size is too small for it.
    """
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[family])
    settings = {**_DEFAULTS, **_OF_FAMILY.get(family, {}), **overrides}
    if family in ("llama", "qwen2", "glm4_moe", "gemma", "olmo2", "deepseek_v2", "deepseek_v3"):
        # These derive or ignore the field in question; an explicit null would not be theirs.
        settings = {k: v for k, v in settings.items() if not (k == "sliding_window" and v is None)}
    if family in ("qwen2", "deepseek_v2", "deepseek_v3") and "head_dim" not in overrides:
        del settings["head_dim"]
    model = model_class(config_class(**settings)).to(dtype)
    _randomize(model, seed)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if settings["vocab_size"] >= NUM_TOKENIZER_IDS:
        write_byte_tokenizer(path)
    return path


def write_byte_tokenizer(path: Path) -> None:
    """A tokenizer with one id per byte, in byte order, and three special tokens."""
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_alphabet() -> list[str]:
    """The printable stand-in for each byte that byte-level tokenizers use, in byte order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and "gemma" in type(model).__name__.lower():
                parameter.copy_(0.2 * noise)  # 1 is added to it
            elif "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
