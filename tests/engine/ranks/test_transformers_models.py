"""Models that transformers' code runs, on several ranks: what these compute is what one computes;
states included."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_kernels.cpu.library import library
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.layout import groups_of
from engine.torch.engine import TorchEngine
from engine.transformers.source import TransformersModel
from tests.engine.ranks.conftest import LoadRanks
from tests.engine.ranks.test_ranks_same_as_one import SAMPLED, kv_of
from tests.support.architectures import make_checkpoint

PROMPTS = [tuple((7 * i + 3 * j) % 96 for i in range(n)) for j, n in enumerate((1, 30, 13))]
#: Tokens of each prompt in the first of two steps.
FIRST = (1, 17, 5)


@pytest.fixture(autouse=True)
def _one_loads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and transformers loads in one thread of a process alone."""
    load, lock = TransformersModel.load_decoder, threading.Lock()

    def alone(*given: Any) -> Any:
        with lock:
            return load(*given)

    monkeypatch.setattr(TransformersModel, "load_decoder", alone)


def run(engine: TorchEngine) -> torch.Tensor:
    """Logits after every token of all prompts, in two steps."""
    size, found = engine.spec.layout.block_size, []
    for table in engine.kv.slot_tables.values():
        table.of_block[:] = type(table.of_block)("q", range(engine.spec.num_blocks))
    for is_second in (False, True):
        slices = []
        for index, (tokens, first) in enumerate(zip(PROMPTS, FIRST, strict=True)):
            start, end = (first, len(tokens)) if is_second else (0, first)
            rows = tuple(SampleRow(i, SAMPLED, (), len(tokens)) for i in range(end - start))
            table = range(8 * index, 8 * index - (-end // size))
            if start < end:
                slices.append(SequenceSlice(tokens[start:end], start, table, rows, len(tokens)))
        found.append(engine.logits(Batch(tuple(slices))))
    return torch.cat(found)


def states_of(engine: TorchEngine) -> list[bytes]:
    """Of each sequence after its last token."""
    found = []
    for index, tokens in enumerate(PROMPTS):
        for piece in groups_of(engine.spec.layout).records_after(len(tokens)):
            out = bytearray(groups_of(engine.spec.layout).record_bytes)
            engine.kv.pack(range(8 * index, 8 * index + 4), piece, memoryview(out))
            found.append(bytes(out))
    return found


def slow(name: str, *degrees: object) -> Any:
    return pytest.param(name, *degrees, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "backend"),
    [
        ("lfm2", 4, 1, "shm"),
        slow("falcon_h1", 2, 2, "shm"),
        slow("granitemoehybrid", 2, 1, "shm"),
        slow("granitemoehybrid", 2, 1, "gloo"),
        slow("qwen3_next", 2, 1, "shm"),
        slow("jamba", 2, 1, "shm"),
        slow("gpt2", 2, 2, "gloo"),
        slow("gpt_oss", 1, 2, "shm"),
        slow("gpt_oss", 2, 1, "shm"),
        slow("bloom", 2, 1, "shm"),
    ],
)
def test_ranks_compute_what_one_computes(
    name: str, tensor: int, pipeline: int, backend: str, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    """Convolutions, Mamba 1 and 2, the gated delta rule; experts, sinks, ALiBi, transposed
    weights."""
    path = make_checkpoint(tmp_path, name)
    common = {"model_impl": "transformers", "num_blocks": 32, "max_num_seqs": 32}
    one = load_ranks(path, 1, **common)
    several = load_ranks(
        path, tensor, pipeline_parallel_size=pipeline, distributed_backend=backend, **common
    )
    expected, found = run(one), run(several)
    assert expected.isfinite().all()
    if library() is None:
        assert (found - expected).norm() / expected.norm() < 1e-5
        return
    assert torch.equal(found, expected)
    assert kv_of(several) == kv_of(one)
    assert states_of(several) == states_of(one)
