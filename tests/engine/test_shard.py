"""Ranks hold everything between them, and a rank's query heads find their KV heads where it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.errors import ConfigError
from engine.families.config import ModelConfig
from engine.families.read import parse_config, read_config
from engine.memory_plan import MemoryPlan
from engine.ranks.mesh import Degrees
from engine.ranks.start import check_ranks
from engine.shard import WHOLE, Shard, check_size
from engine.torch.parameters import Target, empty_parameters
from tests.support.memory_plan import plan_memory

BOX = read_config(Path(__file__).parents[2] / "models" / "baton-py-6m")


@given(num=st.integers(1, 500), size=st.integers(1, 9))
def test_parts_are_everything_once_in_order(num: int, size: int) -> None:
    parts = [Shard(rank, size).part(num) for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(num))
    assert len(parts[0]) == max(map(len, parts)) == -(-num // size)


@given(
    num_kv_heads=st.integers(1, 8), group=st.integers(1, 8), size=st.sampled_from([1, 2, 3, 4, 8])
)
def test_query_heads_and_their_kv_heads_are_on_one_rank(
    num_kv_heads: int, group: int, size: int
) -> None:
    config = replace(
        BOX,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        hidden_size=240,
        intermediate_size=480,
    )
    try:
        check_size(config, size)
    except ConfigError:
        assume(False)
    held: set[int] = set()
    for rank in range(size):
        shard = Shard(rank, size)
        own = shard.attention_config(config)
        heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(num_kv_heads)
        assert (own.num_heads, own.num_kv_heads) == (len(heads), len(kv_heads))
        # Within a rank a query head reads the KV head that its group comes to there.
        per_kv_head = own.num_heads // own.num_kv_heads
        assert [head // group for head in heads] == [
            kv_heads[i // per_kv_head] for i in range(len(heads))
        ]
        held.update(kv_heads)
    assert held == set(range(num_kv_heads))


@pytest.mark.parametrize(
    ("changes", "size", "told"),
    [
        ({}, 3, "num_heads=8 is no multiple of it; this model takes 1, 2, 4, 8"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "num_kv_heads=6 is neither"),
        ({"intermediate_size": 670}, 4, "intermediate_size=670 is no multiple"),
    ],
)
def test_what_ranks_cannot_share_is_named(changes: dict[str, int], size: int, told: str) -> None:
    config: ModelConfig = replace(BOX, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}: {told}"):
        check_size(config, size)


def test_a_part_of_sums_does_not_end_within_a_block_of_mxfp4_that_stays_packed() -> None:
    """2,880 inputs are 90 blocks: 45 a rank of two, and none fits four. Dequantised, as on a CPU,
    the part may end anywhere; experts are cut by no rank that has them whole."""
    raw = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    config = parse_config(raw)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, Degrees(4, cut="sums"), gpu)
    assert str(caught.value).startswith(
        "tensor_parallel_size=4: with tensor_parallel_cut=sums moe_intermediate_size=2880 is no "
        "multiple of it times the 32 weights of a scale; this model takes 1, 2"
    )
    check_ranks(config, Degrees(2, cut="sums"), gpu)
    check_ranks(config, Degrees(4, cut="sums"), cpu)
    check_ranks(config, Degrees(4), gpu)
    check_ranks(config, Degrees(4, whole_experts=True, cut="sums"), gpu)


def test_ranks_share_the_memory() -> None:
    def plan(num_ranks: int) -> MemoryPlan:
        return plan_memory(
            BOX,
            dtype="bfloat16",
            block_size=16,
            max_model_len=2048,
            max_num_seqs=64,
            max_num_batched_tokens=64,
            available_bytes=1 << 30,
            degrees=Degrees(num_ranks),
            kv_cache_memory_bytes=32 << 20,
        )

    one, two, four = (plan(n) for n in (1, 2, 4))
    # Two ranks have a KV head each; of four, two have the same.
    assert two.num_blocks == one.num_blocks == 2 * four.num_blocks
    assert one.block_bytes == 2 * two.block_bytes == 2 * four.block_bytes
    assert one.weight_bytes == 2 * two.weight_bytes
    assert dict(two.rows())["ranks"] == "2, each with:"
    assert "ranks" not in dict(one.rows())


def test_ranks_fill_every_tensor_between_them() -> None:
    def targets(shard: Shard) -> dict[str, Target]:
        empty = empty_parameters(BOX, torch.float32, torch.device("meta"), shard)
        return dict(empty.targets())

    whole = targets(WHOLE)
    for size in (2, 4):
        ranks = [targets(Shard(rank, size)) for rank in range(size)]
        for name, target in whole.items():
            parts = [rank[name] for rank in ranks]
            assert {part.shape for part in parts} == {target.shape}
            rows = [row for part in parts for row in part.sources[0].rows]
            assert set(rows) == set(target.sources[0].rows)
            # Two KV heads of four ranks are held twice; norms are everywhere.
            num_holders = 1 if "_proj" in name or "embed" in name else size
            if "k_proj" in name or "v_proj" in name:
                num_holders = size // 2
            assert len(rows) == num_holders * target.sources[0].num_rows
