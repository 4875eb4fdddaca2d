"""On the native kernels a token's KV and logits are the same to the bit whatever the chunks, the
batch and the block size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch.engine import TorchEngine
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model

LENGTHS = (3, 40, 75)
NUM_BLOCKS = 40
Cut = Callable[[random.Random, int], int]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=512, sliding_window=50
    )


def tokens_of(index: int) -> list[int]:
    return [random.Random(index).randrange(256) for _ in range(LENGTHS[index])]


def run(
    engine: TorchEngine, seed: int, cut: Cut, together: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """KV and logits of every token of each sequence, computed in chunks as `cut` says."""
    rng = random.Random(seed)
    size = engine.spec.layout.block_size
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[blocks.pop() for _ in range(-(-n // size))] for n in LENGTHS]
    done = [0] * len(LENGTHS)
    logits: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    pools = [engine.kv.tensor]
    if engine.kv.scales is not None:
        pools.append(engine.kv.scales[..., None])
    for pool in pools:
        # NaN, in every type that has one.
        pool.view(torch.uint8).fill_(255)
    while any(at < n for at, n in zip(done, LENGTHS, strict=True)):
        waiting = [i for i, n in enumerate(LENGTHS) if done[i] < n]
        chosen = waiting if together else waiting[:1]
        slices = []
        for i in chosen:
            start, tokens = done[i], tokens_of(i)
            done[i] = min(LENGTHS[i], start + cut(rng, LENGTHS[i]))
            new = tokens[start : done[i]]
            rows = tuple(
                SampleRow(j, Sampling(), tokens[: start + j + 1], len(tokens))
                for j in range(len(new))
            )
            slices.append(SequenceSlice(new, start, tables[i], rows))
        parts = engine.logits(Batch(tuple(slices))).split_with_sizes(
            [len(part.token_ids) for part in slices]
        )
        for i, part in zip(chosen, parts, strict=True):
            logits[i].append(part)
    kv = [
        pool.view(torch.uint8)[table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :n]
        for table, n in zip(tables, LENGTHS, strict=True)
        for pool in pools
    ]
    return kv, [torch.cat(part) for part in logits]


@pytest.mark.few_cases(1)
@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        ("float32", "auto"),
        ("float32", "int8"),
        ("bfloat16", "auto"),
        ("bfloat16", "int8"),
        ("bfloat16", "fp8"),
    ],
)
def test_same_bits(model: Path, dtype: str, kv_cache_dtype: str) -> None:
    engines = [
        load_engine(
            str(model),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=size,
            num_blocks=NUM_BLOCKS,
        )
        for size in (5, 16)
    ]
    kv, logits = run(engines[0], 0, lambda _, length: length, together=False)
    cuts: list[tuple[Cut, bool]] = [
        (lambda _, __: 1, True),
        (lambda _, __: 33, True),
        (lambda rng, _: rng.randrange(1, 40), True),
        (lambda rng, _: rng.randrange(1, 40), False),
    ]
    for seed, (cut, together) in enumerate(cuts):
        other_kv, other_logits = run(engines[seed % 2], seed, cut, together)
        assert all(map(torch.equal, kv, other_kv)), seed
        assert all(map(torch.equal, logits, other_logits)), seed
