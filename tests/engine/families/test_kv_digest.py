"""Workers of several releases take each other's KV while a family's config keeps its digest."""

from __future__ import annotations

from typing import Any

import pytest

from engine.families.read import parse_config

#: What a family's own defaults lack: they are odd, or null, there.
LACKING: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
}

#: Digests of a config.json that has only model_type, as release 0.1.0 and later ones computed them.
DIGESTS = {
    "llama": "e5c24c5efdb284c7",
    "mistral": "8759214924cb5785",
    "qwen2": "9590ea7187da34e0",
    "qwen3": "00e913bce8937194",
    "mixtral": "46385f51d75d65ea",
    "qwen3_moe": "f5885df5d1fda148",
    "glm4_moe": "b115418a197c0dfb",
    "gemma": "269a5ac88a2746e6",
    "gemma2": "f3c24bdea7c79e99",
    "gemma3_text": "8fbbd2d9fba7cb9a",
    "gpt_oss": "70e865273169f6c0",
    "phi3": "9e1e1bbe1410c9d3",
    "deepseek_v2": "7c22b82b91b69966",
    "deepseek_v3": "ead118cbe177d693",
    "kimi_k2": "37606d68aa845db1",
    "olmo2": "3d0230a31e900b5f",
}


@pytest.mark.parametrize("family", DIGESTS)
def test_the_digest_of_a_familys_defaults_is_that_of_earlier_releases(family: str) -> None:
    config = parse_config({"model_type": family, **LACKING.get(family, {})})
    assert config.kv_digest == DIGESTS[family]
