"""What a pipeline of stages computes is what one rank computes, to the bit with the native kernels;
with launches in flight, too."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import EngineFault
from baton.types import Sample, Sampling, SequenceSpec
from baton_kernels.cpu.library import library
from engine.interface import Batch, Launched, LayersDone, SampleRow, SequenceSlice
from engine.torch.decoder import Decoder, PackedBatch
from engine.torch.engine import TorchEngine
from kv_transfer.transport.loopback import LoopbackHub
from tests.engine.ranks.conftest import LoadRanks
from tests.engine.ranks.test_ranks_same_as_one import (
    PROMPTS,
    SAMPLED,
    batch_of,
    kv_of,
    packed_4,
)
from tests.support.quantized_models import compressed, make_quantized
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

pytestmark = pytest.mark.slow

MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "tied": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "mixture": ("qwen3_moe", {"num_hidden_layers": 3}),
    "latent": ("deepseek_v3", {"num_hidden_layers": 3}),
    "windows": ("gemma3_text", {"num_hidden_layers": 4, "sliding_window": 6}),
    "sinks": ("gpt_oss", {"num_hidden_layers": 3, "sliding_window": 6}),
}


LONG = [[7, 8, 9] * 20, [i * 7 % 250 for i in range(45)], [40, 9], list(range(60, 83))]
NUM_TOKENS = 12
SHAPE = SimShape(num_blocks=80, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)


def load_worker(load_ranks: LoadRanks, model: Path, tensor: int, pipeline: int) -> TorchEngine:
    return load(
        load_ranks,
        model,
        tensor,
        pipeline,
        num_blocks=SHAPE.num_blocks,
        block_size=SHAPE.block_size,
        max_num_seqs=SHAPE.max_num_seqs,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        frees_windows=True,
    )


def serve(prefill: TorchEngine, decodes: list[TorchEngine]) -> tuple[list[list[int]], list[int]]:
    """What the prompts get, moving now and then, and the most launches that each engine had."""
    client, hub = SimClient(random.Random(1), [], [], move_rate=0.1), LoopbackHub()
    watches = [CountedLaunches(engine) for engine in (prefill, *decodes)]
    client.prefills.append(SimPrefill(hub, lambda: client.now, SHAPE, given_engine=prefill))
    for index, engine in enumerate(decodes):
        worker = SimDecode(hub, lambda: client.now, SHAPE, f"d{index}", given_engine=engine)
        client.decodes.append(worker)
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    client.waiting += [
        SequenceSpec(f"r{index}", tuple(prompt), sampling, arrival_ns=index)
        for index, prompt in enumerate(LONG)
    ]
    client.run()
    client.quiet()
    assert not client.failed
    outputs = [client.output_of(Choice(f"r{i}", 0)) for i in range(len(LONG))]
    return outputs, [watch.most for watch in watches]


class CountedLaunches:
    """Counts an engine's launches in flight. most: before a further one was launched."""

    def __init__(self, engine: TorchEngine) -> None:
        self.num_in_flight = self.most = 0
        self._launch = engine.launch
        engine.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        launched = self._launch(batch, layers_done)
        self.most = max(self.most, self.num_in_flight)
        self.num_in_flight += 1
        return CountedLaunch(self, launched)


@dataclass
class CountedLaunch:
    counts: CountedLaunches
    launched: Launched

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        self.counts.num_in_flight -= 1
        return self.launched.samples()


def load(
    load_ranks: LoadRanks, model: Path, tensor: int, pipeline: int, **options: Any
) -> TorchEngine:
    options = {"dtype": "float32", **options}
    return load_ranks(model, tensor, pipeline_parallel_size=pipeline, **options)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_kv_are_those_of_one_rank(
    name: str, backend: str, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    family, settings = MODELS[name]
    model = make_tiny_model(tmp_path, family, **settings)
    one = load(load_ranks, model, 1, 1)
    wanted = one.logits(batch_of(one))
    for tensor, pipeline in ((1, 2), (1, 3), (2, 2)):
        engine = load(load_ranks, model, tensor, pipeline, distributed_backend=backend)
        told: list[tuple[int, int]] = []
        logits = engine.logits(batch_of(engine), lambda *layers, told=told: told.append(layers))
        assert [layer for first, num in told for layer in range(first, first + num)] == list(
            range(engine.spec.layout.num_layers)
        )
        assert engine.spec == replace(
            one.spec, max_num_launches=pipeline, is_pipelined=True, computes_aside=True
        )
        if library() is not None:
            assert torch.equal(logits, wanted)
            assert kv_of(engine) == kv_of(one)
        else:
            assert (logits - wanted).norm() / wanted.norm() < 1e-5


def test_launches_in_flight_give_the_samples_of_each_alone(
    tmp_path: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    """Chunks of a prompt, and other sequences, are in all stages at once."""
    model = make_tiny_model(tmp_path, "llama", num_hidden_layers=4)
    engine = load(load_ranks, model, 2, 2)
    prompt = PROMPTS[1]
    row = SampleRow(len(prompt) - 21, SAMPLED, prompt, len(prompt))
    other = SequenceSlice(
        PROMPTS[2], 0, (9, 8), (SampleRow(12, SAMPLED, PROMPTS[2], len(PROMPTS[2])),)
    )
    batches = [
        Batch((SequenceSlice(prompt[:9], 0, (3, 1, 7, 5)),)),
        Batch((other, SequenceSlice(prompt[9:20], 9, (3, 1, 7, 5)))),
        Batch((SequenceSlice(prompt[20:], 20, (3, 1, 7, 5), (row,)),)),
    ]
    launched = [engine.launch(batch) for batch in batches]
    together = [each.samples() for each in launched]
    assert together == [engine.forward(batch) for batch in batches]
    alone = load(load_ranks, model, 1, 1)
    if library() is not None:
        assert together == [alone.forward(batch) for batch in batches]
    assert not losses


def test_a_launch_returns_before_later_stages_have_computed_it(
    tmp_path: Path, load_ranks: LoadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begin = threading.Event(), Decoder.begin

    def wait(self: Decoder, batch: PackedBatch) -> torch.Tensor:
        assert self.stage.is_first or go.wait(60)
        return begin(self, batch)

    monkeypatch.setattr(Decoder, "begin", wait)
    engine = load(load_ranks, make_tiny_model(tmp_path, "llama"), 1, 2)
    told: list[tuple[int, int]] = []
    batch = batch_of(engine)
    launched = engine.launch(batch, lambda *layers: told.append(layers))
    num_layers = engine.spec.layout.num_layers
    # The first stage's layers may leave; what they come to is not known.
    assert sum(num for _, num in told) < num_layers
    go.set()
    assert launched.samples() == engine.forward(batch)
    assert sum(num for _, num in told) == num_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_of_a_quantised_checkpoint(
    dtype: str, tmp_path: Path, load_ranks: LoadRanks
) -> None:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    stored = compressed("pack-quantized", symmetric=True, **scheme)
    path, _ = make_quantized(tmp_path, packed_4, stored)
    one, two = (load(load_ranks, path, 1, size, dtype=dtype) for size in (1, 2))
    wanted, logits = (engine.logits(batch_of(engine)) for engine in (one, two))
    assert one.spec.layout == two.spec.layout, "the digest is that of the whole checkpoint"
    assert (logits - wanted).norm() / wanted.norm() < (1e-5 if dtype == "float32" else 0.02)
    assert library() is None or torch.equal(logits, wanted)


def test_a_request_at_fault_fails_alone_and_stages_go_on(
    tmp_path: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    engine = load(load_ranks, make_tiny_model(tmp_path, "llama"), 1, 2)
    row = SampleRow(0, Sampling(), (5,), 1)
    good = SequenceSlice((5,), 0, (9,), (row,))
    expected = engine.forward(Batch((good,)))
    nothing = SequenceSlice((5,), 0, (8,), (SampleRow(0, Sampling(), (5,), 1, allowed=bytes(33)),))
    with pytest.raises(EngineFault):
        engine.launch(Batch((good, SequenceSlice((5,), 0, (64,), (row,)))))
    failing, after = engine.launch(Batch((good, nothing))), engine.launch(Batch((good,)))
    with pytest.raises(EngineFault) as caught:
        failing.samples()
    assert caught.value.metadata["slices"] == "1"
    assert after.samples() == expected
    assert engine.forward(Batch(())) == ()
    assert not losses


@pytest.mark.parametrize("name", MODELS)
def test_workers_of_any_stages_hand_over(
    name: str, tmp_path: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    """Tokens are those of transformers; stages have several launches at once on either tier."""
    family, settings = MODELS[name]
    model = make_tiny_model(tmp_path, family, **settings)
    degrees = (1, 3), (2, 2), (1, 1)
    prefill, *decodes = (load_worker(load_ranks, model, *each) for each in degrees)
    outputs, most = serve(prefill, decodes)
    assert outputs == greedy_outputs(model, [list(prompt) for prompt in LONG], NUM_TOKENS)
    assert most[:2] == [2, 1]
    assert not losses
