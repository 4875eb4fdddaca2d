"""Ranks that share a step's tokens compute what one computes: to the bit with the native kernels,
within rounding without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.types import Sampling
from baton_kernels.cpu.library import library
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.interface import KvPool
from engine.kv.range import KvRange
from engine.kv.tensors.part import pool_part
from engine.torch.engine import TorchEngine
from tests.engine.ranks.conftest import LoadRanks
from tests.engine.ranks.test_ranks_same_as_one import SAMPLED, kv_of
from tests.support.drive_engine import generate, token_ids
from tests.support.tiny_models import Family, make_tiny_model

#: Of each kind of KV and of layers.
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 20}),
    "two-pools": ("gemma2", {"sliding_window": 6}),
    "latents": ("deepseek_v2", {}),
    "experts": ("qwen3_moe", {}),
    "dynamic-rope": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
}
#: Tokens of each prompt: one is cut, others go whole to a rank.
LENGTHS = (150, 1, 40, 9)
PROMPTS = [tuple((7 * i + 3 * j) % 256 for i in range(n)) for j, n in enumerate(LENGTHS)]
#: Ranks of a context, and ranks that share each layer.
DEGREES = ((2, 1), (3, 1), (2, 2))


def batch_of(block_size: int) -> Batch:
    """All prompts, with rows after some of the tokens, twice after the last."""
    slices, first = [], 0
    for tokens in PROMPTS:
        end = len(tokens) - 1
        offsets = (*range(0, end, 13), end, end)
        rows = tuple(SampleRow(i, SAMPLED, tokens[: i + 1], len(tokens)) for i in offsets)
        table = range(first, first := first - (-len(tokens) // block_size))
        slices.append(SequenceSlice(tokens, 0, table, rows, len(tokens)))
    return Batch(tuple(slices))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, settings = MODELS[request.param]
    return make_tiny_model(tmp_path, family, **settings)


def same(engine: TorchEngine, one: TorchEngine, logits: torch.Tensor, wanted: torch.Tensor) -> None:
    assert engine.spec == replace(one.spec, max_num_launches=1)
    assert wanted.isfinite().all()
    if library() is not None:
        assert torch.equal(logits, wanted)
        assert kv_of(engine) == kv_of(one)
    else:
        assert (logits - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_kv_are_those_of_one_rank(
    model: Path, dtype: str, load_ranks: LoadRanks
) -> None:
    one = load_ranks(model, 1, dtype=dtype)
    wanted = one.logits(batch_of(8))
    for context, tensor in DEGREES:
        engine = load_ranks(model, tensor, context_parallel_size=context, dtype=dtype)
        same(engine, one, engine.logits(batch_of(8)), wanted)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "int8"}, {"distributed_backend": "gloo"}, {"block_size": 16}]
)
def test_any_pool_and_backend_will_do(
    tmp_path: Path, options: dict[str, Any], load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "llama")
    one, two = (load_ranks(path, 1, context_parallel_size=size, **options) for size in (1, 2))
    batch = batch_of(options.get("block_size", 8))
    same(two, one, two.logits(batch), one.logits(batch))


#: Of each rank other than 0: makes its pool, for the layout of the whole model.
POOLS: list[Any] = []


def serve(_link: Any, make_pool: Any, _host: str, _marks: Any) -> None:
    """The service of a rank's KV here."""
    POOLS.append(make_pool)


@pytest.mark.parametrize(
    ("family", "context", "tensor", "options"),
    [
        ("gemma2", 2, 1, {"distributed_backend": "gloo"}),
        ("qwen3", 3, 1, {"kv_cache_dtype": "int8", "block_size": 16}),
        ("deepseek_v2", 2, 2, {"distributed_backend": "gloo", "dtype": "bfloat16"}),
        ("llama", 2, 2, {"kv_cache_dtype": "fp8"}),
    ],
)
def test_ranks_with_a_pool_each_have_the_kv_of_all(
    family: Family,
    context: int,
    tensor: int,
    options: dict[str, Any],
    tmp_path: Path,
    load_ranks: LoadRanks,
) -> None:
    """As on several hosts; after a long step, which they divide, and a short one, which each runs
    as a whole."""
    POOLS.clear()
    settings = {"gemma2": {"sliding_window": 6}}.get(family, {})
    path, size = make_tiny_model(tmp_path, family, **settings), options.get("block_size", 8)
    one = load_ranks(path, tensor, **options, frees_windows=False)
    more = {"context_parallel_size": context, "kv_service": __name__}
    several = load_ranks(path, tensor, **options, **more)
    row = SampleRow(0, SAMPLED, (), 2)
    short = Batch((SequenceSlice((7, 8), 0, range(50, 51), (row,), 2),))
    # The last one, because ranks come to the end of a short one after rank 0.
    for batch in (batch_of(size), short, batch_of(size)):
        wanted, logits = one.logits(batch), several.logits(batch)
        if library() is not None:
            assert torch.equal(logits, wanted)
        else:
            assert (logits - wanted).norm() / wanted.norm() < 0.02
    ranks = several.kv_ranks
    assert ranks is not None
    POOLS.sort(key=lambda make_pool: make_pool.args[0].rank)
    pools = [ranks.pool, *(make_pool(one.spec.layout) for make_pool in POOLS)]
    assert len(pools) == context * tensor
    if library() is not None:
        for part, pool in zip(ranks.parts, pools, strict=True):
            assert contents(pool, size) == contents(pool_part(one.kv, part), size)


def contents(pool: KvPool, block_size: int) -> bytes:
    """The KV of all prompts and of the short one."""
    found = []
    tables = [(part.block_table, len(part.token_ids)) for part in batch_of(block_size).slices]
    for table, num_tokens in (*tables, (range(50, 51), 2)):
        piece = KvRange(0, num_tokens, 0, pool.layout.num_layers)
        out = bytearray(piece.num_bytes(pool.layout.token_layer_bytes))
        pool.pack(table, piece, memoryview(out))
        found.append(bytes(out))
    return b"".join(found)


@pytest.mark.slow
def test_tokens_do_not_depend_on_chunks(tmp_path: Path, load_ranks: LoadRanks) -> None:
    """Steps of few tokens, which one rank computes, lie between the others."""
    path = make_tiny_model(tmp_path, "qwen3")
    samplings = [SAMPLED, Sampling(), Sampling(temperature=0.7, seed=2), Sampling()]
    one, two = (load_ranks(path, 1, context_parallel_size=size) for size in (1, 2))
    wanted = token_ids(generate(one, PROMPTS, samplings, 8))
    for chunk in (33, 70, 1 << 30):
        assert token_ids(generate(two, PROMPTS, samplings, 8, chunk_tokens=chunk)) == wanted


@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_are_reported_once_all_ranks_have_written_them(
    tmp_path: Path, tensor: int, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "llama", num_hidden_layers=4)
    one = load_ranks(path, tensor)
    two = load_ranks(path, tensor, context_parallel_size=2)
    reported: list[list[bytes]] = []
    for engine in (one, two):
        seen: list[bytes] = []

        def note(
            first: int, count: int, engine: TorchEngine = engine, seen: list[bytes] = seen
        ) -> None:
            out = bytearray(count * 150 * engine.spec.layout.token_layer_bytes)
            engine.kv.pack(range(19), KvRange(0, 150, first, count), memoryview(out))
            seen.append(bytes(out))

        for _ in range(10):
            engine.forward(Batch((SequenceSlice(PROMPTS[0], 0, range(19)),)), note)
            engine.kv.tensor.zero_()
        reported.append(seen)
    assert list(map(len, reported[0])) == list(map(len, reported[1]))
    if library() is not None:
        assert reported[0] == reported[1]


def test_kv_memory_is_shared_by_the_ranks_of_a_context(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "llama")
    options = {"num_blocks": None, "kv_cache_memory_bytes": 1 << 20}
    one, two = (load_ranks(path, 1, context_parallel_size=n, **options) for n in (1, 2))
    assert two.spec.num_blocks == one.spec.num_blocks
    assert two.kv.has_block_views
