"""Memory plans of Baton's own families, by what a test varies."""

from __future__ import annotations

from baton.types import KvLayout
from engine.families.config import ModelConfig
from engine.memory_plan import MemoryPlan, activation_bytes, plan_blocks, weight_bytes
from engine.ranks.mesh import ONE_RANK, Degrees


def plan_memory(
    config: ModelConfig,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    available_bytes: int,
    degrees: Degrees = ONE_RANK,
    kv_cache_memory_bytes: int | None = None,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """See plan_blocks. kv_dtype: `dtype` if not given."""
    heads = (config.num_layers, config.num_kv_heads, config.head_dim)
    return plan_blocks(
        KvLayout("", *heads, kv_dtype or dtype, block_size, config.kv_parts),
        dtype=dtype,
        weights=weight_bytes(config, dtype, False, degrees),
        activations=activation_bytes(
            config, dtype, max_num_batched_tokens, max_num_seqs, max_model_len
        ),
        graphs=graph_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        available_bytes=available_bytes,
        degrees=degrees,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_blocks=None,
    )
