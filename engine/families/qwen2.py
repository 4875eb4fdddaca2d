"""Qwen 2 and 2.5: biases of queries, keys and values, and a window in the upper layers."""

from engine.families import windows
from engine.families.family import Family
from engine.families.fields import COMMON, bools, ints, ints_or_null

FIELDS = {
    **COMMON,
    **ints(vocab_size=151936, intermediate_size=22016, max_window_layers=28),
    **ints_or_null(sliding_window=4096),
    **bools(use_sliding_window=False),
}
FAMILY = Family("qwen2", "Qwen2ForCausalLM", FIELDS, windows=windows.upper, has_qkv_bias=True)
