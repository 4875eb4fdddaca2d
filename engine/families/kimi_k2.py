"""Kimi K2: a DeepSeek-V3 under another name."""

from dataclasses import replace

from engine.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="kimi_k2")
