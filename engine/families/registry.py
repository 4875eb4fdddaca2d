"""Families that Baton's own code runs, by model_type. A new family adds one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.families import (
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    kimi_k2,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from engine.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        module.FAMILY.name: module.FAMILY
        for module in (
            llama,
            mistral,
            qwen2,
            qwen3,
            mixtral,
            qwen3_moe,
            glm4_moe,
            gemma,
            gemma2,
            gemma3,
            gpt_oss,
            phi3,
            deepseek_v2,
            deepseek_v3,
            kimi_k2,
            olmo2,
        )
    }
)
