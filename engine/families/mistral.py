"""Mistral: a Llama with a window."""

from engine.families import windows
from engine.families.family import Family
from engine.families.fields import COMMON, ints, ints_or_null

FIELDS = {
    **COMMON,
    **ints(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072),
    **ints_or_null(sliding_window=4096),
}
FAMILY = Family("mistral", "MistralForCausalLM", FIELDS, windows=windows.alike)
