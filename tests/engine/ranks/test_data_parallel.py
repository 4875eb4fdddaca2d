"""Ranks with sequences of their own that share experts compute what one rank computes: to the bit
with the native kernels, within rounding without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.types import Sampling
from engine.families.read import read_config
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.memory_plan import weight_bytes
from engine.ranks.expert_load import read_loads
from engine.ranks.mesh import Degrees
from engine.ranks.sequence_shares import divide_sequences
from engine.ranks.start import check_ranks
from tests.engine.ranks.conftest import LoadRanks
from tests.engine.ranks.test_context_parallel import PROMPTS, batch_of, same
from tests.support.drive_engine import generate, token_ids
from tests.support.tiny_models import Family, make_tiny_model

#: Latents with dense layers first, whole KV heads, a window in every other layer.
FAMILIES: tuple[Family, ...] = ("deepseek_v3", "qwen3_moe", "gpt_oss")


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_kv_are_those_of_one_rank(
    family: Family, backend: str, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, family)
    one = load_ranks(path, 1)
    two = load_ranks(path, 1, data_parallel_size=2, distributed_backend=backend)
    same(two, one, two.logits(batch_of(8)), one.logits(batch_of(8)))


@pytest.mark.slow
def test_tokens_are_those_of_one_rank_where_some_have_no_sequence(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    """Steps of one sequence leave three of four ranks to their experts alone."""
    path = make_tiny_model(tmp_path, "deepseek_v3")
    one, four = (load_ranks(path, 1, data_parallel_size=size) for size in (1, 4))
    samplings = [Sampling(), Sampling(temperature=0.7, seed=2), Sampling(), Sampling()]
    wanted = token_ids(generate(one, PROMPTS, samplings, 6))
    for chunk in (33, 1 << 30):
        assert token_ids(generate(four, PROMPTS, samplings, 6, chunk_tokens=chunk)) == wanted
    alone = generate(one, PROMPTS[:1], Sampling(), 6)
    assert token_ids(generate(four, PROMPTS[:1], Sampling(), 6)) == token_ids(alone)


def test_layers_are_reported_and_experts_counted(tmp_path: Path, load_ranks: LoadRanks) -> None:
    path, file = make_tiny_model(tmp_path, "deepseek_v3"), tmp_path / "load.json"
    two = load_ranks(path, 1, data_parallel_size=2, expert_load_file=file)
    seen: list[int] = []
    tokens = PROMPTS[2]
    rows = tuple(SampleRow(i, Sampling(), tokens[: i + 1], 40) for i in range(40))
    tables = range(5), range(5, 10)
    batch = Batch(tuple(SequenceSlice(tokens, 0, table, rows, 40) for table in tables))
    two.forward(batch, lambda first, count: seen.extend(range(first, first + count)))
    assert seen == list(range(two.spec.layout.num_layers))
    two.close()
    # Each rank has one of the two sequences; 3 experts are chosen for each of their tokens.
    _, loads = read_loads(file, read_config(path))
    assert sum(loads) == 2 * 3 * len(tokens)


def test_a_rank_needs_less_memory_for_weights(tmp_path: Path) -> None:
    config = read_config(make_tiny_model(tmp_path, "deepseek_v3"))
    of_all, own = (
        weight_bytes(config, "float32", keeps_levels=False, degrees=degrees)
        for degrees in (Degrees(), Degrees(context=2, by_sequence=True))
    )
    experts = config.traits.experts
    assert experts is not None
    weights = 3 * sum(experts.layers) * experts.num_experts * config.hidden_size
    assert of_all - own == weights * experts.intermediate_size * 4 // 2


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 5))
def test_each_sequence_is_one_ranks_and_tokens_are_shared_fairly(
    lengths: list[int], size: int
) -> None:
    batch = Batch(tuple(SequenceSlice((1,) * length, 0, ()) for length in lengths))
    shares = divide_sequences(batch, size)
    assert sorted(index for share in shares for index in share.indices) == list(range(len(lengths)))
    loads = [share.batch.num_tokens for share in shares]
    assert sum(loads) == batch.num_tokens
    assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize(
    ("family", "size", "told"),
    [
        ("llama", 2, r"data_parallel_size=2: a llama model .* has no experts to share; leave it"),
        ("qwen3_moe", 3, r"data_parallel_size=3: num_experts=8 is no multiple of it; give a div"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    family: Family, size: int, told: str, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_ranks(make_tiny_model(tmp_path, family), 1, data_parallel_size=size)


def test_on_gpus_the_option_that_was_given_is_refused(tmp_path: Path) -> None:
    config = read_config(make_tiny_model(tmp_path, "qwen3_moe"))
    with pytest.raises(ConfigError, match=r"data_parallel_size=2: .* GPUs do not share"):
        check_ranks(config, Degrees(context=2, by_sequence=True), torch.device("cuda"))
