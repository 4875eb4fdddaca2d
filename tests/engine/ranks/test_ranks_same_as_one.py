"""What several ranks compute is what one computes: to the bit with the native kernels, within
rounding without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import EngineFault
from baton.types import Sampling
from baton_kernels.cpu.library import library
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.range import KvRange
from engine.torch.engine import TorchEngine
from tests.engine.ranks.conftest import LoadRanks
from tests.support.drive_engine import generate, token_ids
from tests.support.quantized_models import compressed, make_quantized, packed_pieces, round_weight
from tests.support.tiny_models import Family, make_tiny_model

SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=7, logprobs=3)
PROMPTS = [tuple((7 * i + 3 * j) % 256 for i in range(n)) for j, n in enumerate((1, 30, 13))]

MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 262}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "window": ("mistral", {"sliding_window": 6}),
    "qkv-bias": ("qwen2", {}),
    "qk-norm": ("qwen3", {}),
    "dynamic-rope": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
        },
    ),
}
#: One model of each kind of KV and of feed-forward layers.
KINDS: dict[Family, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 6},
    "deepseek_v2": {},
    "qwen3_moe": {},
}


def batch_of(engine: TorchEngine) -> Batch:
    """All prompts, each from its first token, with a row after every token."""
    slices = []
    size = engine.spec.layout.block_size
    first = 0
    for tokens in PROMPTS:
        rows = tuple(
            SampleRow(i, SAMPLED, tokens[: i + 1], len(tokens)) for i in range(len(tokens))
        )
        table = range(first, first := first - (-len(tokens) // size))
        slices.append(SequenceSlice(tokens, 0, table, rows, len(tokens)))
    return Batch(tuple(slices))


def kv_of(engine: TorchEngine) -> bytes:
    """All of the pool."""
    layout, num_blocks = engine.spec.layout, engine.spec.num_blocks
    out = bytearray(num_blocks * layout.block_bytes)
    everything = KvRange(0, num_blocks * layout.block_size, 0, layout.num_layers)
    engine.kv.pack(range(num_blocks), everything, memoryview(out))
    return bytes(out)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, settings = MODELS[request.param]
    return make_tiny_model(tmp_path, family, **settings)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_and_kv_are_those_of_one_rank(
    model: Path, dtype: str, load_ranks: LoadRanks
) -> None:
    """The model has two KV heads: of four ranks, two have the same."""
    engines = [load_ranks(model, size, dtype=dtype) for size in (1, 2, 4)]
    one, *others = [engine.logits(batch_of(engine)) for engine in engines]
    assert one.isfinite().all()
    for engine, logits in zip(engines[1:], others, strict=True):
        assert engine.spec == replace(engines[0].spec, max_num_launches=1)
        if library() is not None:
            assert torch.equal(logits, one)
            assert kv_of(engine) == kv_of(engines[0])
        else:
            error = (logits - one).norm() / one.norm()
            assert error < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("family", KINDS)
def test_ranks_over_gloo_compute_the_same(
    family: Family, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    """A dense model, one with windowed layers, one with latents, and a mixture of experts."""
    path = make_tiny_model(tmp_path, family, **KINDS[family])
    sizes = ((1, "auto"), (2, "shm"), (2, "gloo"), (4, "gloo"))
    engines = [
        load_ranks(path, size, dtype="bfloat16", distributed_backend=name) for size, name in sizes
    ]
    one, *others = [engine.logits(batch_of(engine)) for engine in engines]
    for engine, logits in zip(engines[1:], others, strict=True):
        if library() is not None:
            assert torch.equal(logits, one)
            assert kv_of(engine) == kv_of(engines[0])
        else:
            assert (logits - one).norm() / one.norm() < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("each_level")
def test_tokens_do_not_depend_on_ranks_batch_or_chunks(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "qwen3")
    samplings = [SAMPLED, Sampling(), Sampling(temperature=0.7, seed=2)]
    engines = [load_ranks(path, size) for size in (1, 2, 2)]
    wanted = token_ids(generate(engines[0], PROMPTS, samplings, 12))
    for engine, chunk in zip(engines[1:], (5, 1 << 30), strict=True):
        assert token_ids(generate(engine, PROMPTS, samplings, 12, chunk_tokens=chunk)) == wanted
        alone = [
            generate(engine, [prompt], sampling, 12)[0]
            for prompt, sampling in zip(PROMPTS, samplings, strict=True)
        ]
        assert token_ids(alone) == wanted


def packed_4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rounded = round_weight(weight, 4, 16, symmetric=True)
    return packed_pieces(rounded, True, False), rounded.dense()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_are_shared_too(
    tmp_path: Path, dtype: str, load_ranks: LoadRanks
) -> None:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    stored = compressed("pack-quantized", symmetric=True, **scheme)
    path, _ = make_quantized(tmp_path, packed_4, stored)
    one, two = (load_ranks(path, size, dtype=dtype) for size in (1, 2))
    wanted, logits = (engine.logits(batch_of(engine)) for engine in (one, two))
    assert (logits - wanted).norm() / wanted.norm() < (1e-5 if dtype == "float32" else 0.02)
    if library() is not None:
        assert torch.equal(logits, wanted)


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "bfloat16"])
def test_pools_of_any_type_are_shared(
    tmp_path: Path, kv_cache_dtype: str, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "llama")
    one, two = (load_ranks(path, size, kv_cache_dtype=kv_cache_dtype) for size in (1, 2))
    wanted, logits = (engine.logits(batch_of(engine)) for engine in (one, two))
    assert two.spec == replace(one.spec, max_num_launches=1)
    if library() is not None:
        assert torch.equal(logits, wanted)
        assert kv_of(two) == kv_of(one)
        return
    # Products of half the outputs are rounded otherwise: here and there a key or value becomes the
    # code next to it.
    assert (logits - wanted).norm() / wanted.norm() < 0.02
    pairs = list(zip(kv_of(two), kv_of(one), strict=True))
    assert sum(a != b for a, b in pairs) < 0.01 * len(pairs)


@pytest.mark.slow
def test_layers_are_told_once_all_ranks_have_written_them(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_tiny_model(tmp_path, "llama", num_hidden_layers=5)
    one, two = (load_ranks(path, size, layer_group_size=2) for size in (1, 2))
    told: dict[int, list[bytes]] = {1: [], 2: []}
    for size, engine in ((1, one), (2, two)):

        def note(first: int, count: int, size: int = size, engine: TorchEngine = engine) -> None:
            out = bytearray(count * 30 * engine.spec.layout.token_layer_bytes)
            engine.kv.pack((0, 1, 2, 3), KvRange(0, 30, first, count), memoryview(out))
            told[size].append(bytes(out))

        for _ in range(20):
            engine.forward(Batch((SequenceSlice(PROMPTS[1], 0, range(4)),)), note)
            engine.kv.tensor.zero_()
    assert len(told[1]) == 60
    assert list(map(len, told[1])) == list(map(len, told[2]))
    if library() is not None:
        assert told[1] == told[2]


def test_a_request_at_fault_fails_alone_and_ranks_go_on(
    tmp_path: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    engine = load_ranks(make_tiny_model(tmp_path, "llama"), 2)
    row = SampleRow(0, Sampling(), (5,), 1)
    good = SequenceSlice((5,), 0, (9,), (row,))
    expected = engine.forward(Batch((good,)))
    nothing = SampleRow(0, Sampling(), (5,), 1, allowed=bytes(33))
    for wrong in (
        SequenceSlice((5,), 0, (64,), (row,)),
        SequenceSlice((5,), 0, (8,), (nothing,)),
    ):
        with pytest.raises(EngineFault) as caught:
            engine.forward(Batch((good, wrong)))
        assert caught.value.metadata["slices"] == "1"
        assert engine.forward(Batch((good,))) == expected
    assert engine.forward(Batch(())) == ()
    assert not losses
