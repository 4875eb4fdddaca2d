"""Qwen 3: per-head norms of queries and keys."""

from engine.families import qwen2, windows
from engine.families.family import Family
from engine.families.fields import bools, ints

FIELDS = {**qwen2.FIELDS, **ints(head_dim=128), **bools(attention_bias=False)}
FAMILY = Family("qwen3", "Qwen3ForCausalLM", FIELDS, windows=windows.upper, has_qk_norm=True)
