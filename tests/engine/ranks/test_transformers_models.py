"""Models that transformers' code runs, on several ranks: what these compute is what one computes;
states included."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.types import Sampling, SequenceSpec
from baton_kernels.cpu.library import library
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.layout import groups_of
from engine.torch.engine import TorchEngine
from engine.torch.sequence_states import SequenceStates
from engine.transformers import states
from engine.transformers.source import TransformersModel
from kv_transfer.transport.loopback import LoopbackHub
from tests.engine.ranks.conftest import LoadRanks
from tests.engine.ranks.test_ranks_same_as_one import SAMPLED, kv_of
from tests.support.architectures import make_checkpoint
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape

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


#: A step of one more token of each prompt.
NEXT = Batch(
    tuple(
        SequenceSlice(
            *((7,), len(tokens), range(8 * index, 8 * index + 8)),
            (SampleRow(0, SAMPLED, (), 1),),
        )
        for index, tokens in enumerate(PROMPTS)
    )
)


@pytest.mark.parametrize("name", ["lfm2", slow("granitemoehybrid"), slow("qwen3_next")])
def test_ranks_call_a_layer_with_a_state_once_for_several_sequences(
    name: str, tmp_path: Path, load_ranks: LoadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as each rank may."""
    path = make_checkpoint(tmp_path, name)
    common = {"model_impl": "transformers", "num_blocks": 32, "max_num_seqs": 32}
    monkeypatch.setattr(states, "most_rows", lambda *_: 1)
    one_by_one = load_ranks(path, 2, **common)
    allowed = iter((5, 2))
    monkeypatch.setattr(states, "most_rows", lambda *_: next(allowed))
    together, seen = load_ranks(path, 2, **common), list[int]()
    advance = states._LayerStates._advance

    def note(layer: Any, hidden: torch.Tensor, part: SequenceStates) -> torch.Tensor:
        seen.append(part.num_sequences)
        return advance(layer, hidden, part)

    monkeypatch.setattr(states._LayerStates, "_advance", note)
    expected, found = run(one_by_one), run(together)
    torch.testing.assert_close(found, expected)
    seen.clear()
    expected = one_by_one.logits(NEXT)
    assert set(seen) == {1}
    seen.clear()
    found = together.logits(NEXT)
    assert set(seen) == {2, 1}
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["lfm2", slow("granitemoehybrid")])
def test_ranks_try_rows_together_and_have_the_bits_of_one(
    name: str, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    path = make_checkpoint(tmp_path, name)
    common = {"model_impl": "transformers", "num_blocks": 32, "max_num_seqs": 32}
    found = []
    for size in (1, 2):
        engine = load_ranks(path, size, **common)
        run(engine)
        found.append(engine.logits(NEXT))
    if library() is None:
        torch.testing.assert_close(found[1], found[0])
    else:
        assert torch.equal(found[1], found[0])


SHAPE = SimShape(
    num_blocks=60, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_num_launches=1
)
NUM_TOKENS = 8


@pytest.mark.slow
def test_states_go_between_workers_of_unequal_degrees(
    tmp_path: Path, load_ranks: LoadRanks
) -> None:
    """From two ranks to two stages and back: sequences also move between decode workers."""
    path = make_checkpoint(tmp_path, "falcon_h1")
    limits = {
        name: getattr(SHAPE, name)
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
    }

    def load(tensor: int, pipeline: int) -> TorchEngine:
        options = {"model_impl": "transformers", "pipeline_parallel_size": pipeline, **limits}
        return load_ranks(path, tensor, **options)

    def outputs(*engines: TorchEngine) -> list[list[int]]:
        client, hub = SimClient(random.Random(1), [], [], move_rate=0.1), LoopbackHub()
        client.prefills.append(SimPrefill(hub, lambda: client.now, SHAPE, given_engine=engines[0]))
        client.decodes += [
            SimDecode(hub, lambda: client.now, SHAPE, f"d{index}", given_engine=engine)
            for index, engine in enumerate(engines[1:])
        ]
        sampling = Sampling(max_tokens=NUM_TOKENS)
        client.waiting += [
            SequenceSpec(f"r{i}", prompt, sampling, arrival_ns=i)
            for i, prompt in enumerate(PROMPTS)
        ]
        client.run()
        client.quiet()
        assert not client.failed
        assert "Committed" in client.seen
        return [list(client.output_of(Choice(f"r{i}", 0))) for i in range(len(PROMPTS))]

    assert outputs(load(2, 1), load(1, 2), load(2, 1)) == outputs(load(1, 1), load(1, 1))
