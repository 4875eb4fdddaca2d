"""config.json is read as transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from baton.errors import ConfigError, UnsupportedModel
from engine.families.config import ModelConfig
from engine.families.read import parse_config, read_config
from engine.memory_plan import MemoryPlan, num_parameters
from engine.torch.rope import make_rope
from tests.support.memory_plan import plan_memory

MakeModel = Callable[..., Path]

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 12345.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "beta_fast": 20,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def raw(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    return config | changes


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = parse_config(raw(rope_parameters=ROPES[name]))
    rope = make_rope(config, torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw(rope_parameters=dict(ROPES[name]))))
    assert rope.scaling == theirs.attention_scaling
    assert torch.equal(rope.inv_freq[0], theirs.inv_freq)
    for length in (100, 129, 150, 160):
        positions = torch.arange(length)[None]
        cos, sin = theirs(torch.zeros(1), positions)
        (ours,) = rope.tables(
            positions[0], torch.full((length,), length), [range(length)], torch.float32
        )
        torch.testing.assert_close(ours[0], cos[0, :, :8], atol=1e-6, rtol=0)
        torch.testing.assert_close(ours[1], sin[0, :, :8], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ROPES)
def test_the_old_spelling_of_rope_settings_means_the_same(name: str) -> None:
    new = dict(ROPES[name])
    old = {"type" if key == "rope_type" else key: value for key, value in new.items()}
    theta = old.pop("rope_theta")
    scaling = None if name == "default" else old
    configs = (raw(rope_theta=theta, rope_scaling=scaling), raw(rope_parameters=new))
    ours, wanted = (make_rope(parse_config(c), torch.device("cpu")) for c in configs)
    assert torch.equal(ours.inv_freq, wanted.inv_freq)
    assert ours.scaling == wanted.scaling


def test_defaults_are_the_familys() -> None:
    """A field that config.json leaves out has the value that transformers gives it."""
    config = parse_config(raw())
    assert (config.num_kv_heads, config.head_dim, config.is_tied) == (4, 16, False)
    assert parse_config(raw(model_type="mistral", num_key_value_heads=4)).windows == (4096, 4096)
    assert parse_config(raw(model_type="qwen2", num_key_value_heads=4)).has_qkv_bias
    qwen3 = parse_config(raw(model_type="qwen3", num_key_value_heads=4))
    assert (qwen3.head_dim, qwen3.has_qk_norm, qwen3.has_qkv_bias) == (128, True, False)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, (None, None, None)),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            (None, None, 8),
        ),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None,) * 3),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows_of_qwen(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    settings = raw(model_type="qwen2", num_key_value_heads=4, num_hidden_layers=3, **changes)
    assert parse_config(settings).windows == windows


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True, "head_dim": 24}),
    ],
)
def test_parameters_are_counted_as_the_checkpoint_has_them(
    tiny_model: MakeModel, family: str, overrides: dict[str, Any]
) -> None:
    path = tiny_model(family, **overrides)
    with safe_open(path / "model.safetensors", framework="pt") as shard:
        total = sum(shard.get_tensor(name).numel() for name in shard.keys())  # noqa: SIM118
    assert num_parameters(read_config(path)) == total


def test_transformers_own_files_are_read(tiny_model: MakeModel) -> None:
    path = tiny_model("qwen3")
    assert read_config(path) == parse_config(json.loads((path / "config.json").read_text()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rope_theta", value) for value in (0, 0.0, -5, 1)),
        *(("original_max_position_embeddings", value) for value in (0.0, -4, "4096", True)),
    ],
)
def test_a_yarn_model_with_impossible_numbers_is_refused_by_their_name(
    name: str, value: object
) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}={value!r} .*correct it in config.json"):
        parse_config(raw(rope_parameters={**ROPES["yarn"], name: value}))


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_a_size_that_is_none_is_refused_by_its_name(name: str, value: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{name}={value}: must be positive"):
        parse_config(raw(**{name: value}))


CONFIG: ModelConfig = parse_config(raw())


def memory(
    dtype: str, kv_dtype: str, block_size: int, available_bytes: int, budget: int | None = None
) -> MemoryPlan:
    return plan_memory(
        CONFIG,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        available_bytes=available_bytes,
        kv_cache_memory_bytes=budget,
    )


@settings(deadline=None)
@given(
    budget=st.integers(1, 1 << 22),
    block_size=st.integers(1, 64),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kv_dtype=st.sampled_from([None, "float16", "int8"]),
)
def test_a_budget_is_filled_and_not_exceeded(
    budget: int, block_size: int, dtype: str, kv_dtype: str | None
) -> None:
    def plan() -> MemoryPlan:
        return memory(dtype, kv_dtype or dtype, block_size, 1 << 30, budget)

    row_bytes = {"float32": 64, "bfloat16": 32, "float16": 32, "int8": 20}[kv_dtype or dtype]
    block_bytes = 2 * 2 * 4 * row_bytes * block_size
    if budget < block_bytes:
        with pytest.raises(ConfigError, match="no KV block fits"):
            plan()
        return
    made = plan()
    assert made.kv_bytes <= budget < made.kv_bytes + made.block_bytes
    assert made.block_bytes == block_bytes
    blocks = -(-made.longest_context // block_size)
    assert made.num_longest_seqs * blocks <= made.num_blocks < (made.num_longest_seqs + 1) * blocks
    assert str(made.longest_context) in made.render()


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="the weights need"):
        memory("float32", "float32", 16, available_bytes=1000)
