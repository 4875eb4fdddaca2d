"""Models by transformers' code with recorded decode steps, on the kernels that a GPU would run: a
recorded step gives the bits of an eager one, its padding changes no sequence's state, and tokens
are those of transformers, also after a handoff."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.types import KvLayout, Sampling, SequenceSpec
from bench.gpu.interpreter import kernels_on_cpu
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.groups.state import STATE
from engine.kv.tensors.copy_order import CopyOrder
from engine.kv.tensors.device_states import DeviceStates
from engine.ranks import followers
from engine.torch.engine import TorchEngine
from engine.transformers import load as foreign_load
from engine.transformers.devices import Gpu
from kv_transfer.transport.loopback import LoopbackHub
from tests.kernels.interpreted.test_step_graphs import CountedGraphs
from tests.support.architectures import make_checkpoint
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from tests.support.transformers_greedy import greedy_outputs

# Interpreted kernels: on a busy machine more than others may take.
pytestmark = pytest.mark.timeout(1200)

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)
MAX_GRAPH_SEQS, BLOCK_SIZE, NUM_BLOCKS = 4, 16, 16
TEXTS = [[5, 77, 20, 3, 9] * 4, [40, 41], [7, 8, 9], [90]]
#: A short convolution, Mamba 2 beside attention, the gated delta rule.
WITH_STATES = ("lfm2", "falcon_h1", "qwen3_5_text")
#: Two windows, and biases on scores.
DENSE = ("gemma2", "falcon_alibi")


def on_device(
    _device: torch.device, layout: KvLayout, num_blocks: int, num_slots: int, order: CopyOrder
) -> dict[int, DeviceStates]:
    if not layout.num_state_layers:
        return {}
    return {STATE: DeviceStates(layout, num_blocks, num_slots, CPU, order)}


def by_row(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A product of which a row has the same bits among any others."""
    y = (x[..., None, :] * layer.weight).sum(-1)
    return y if layer.bias is None else y + layer.bias


Load = Callable[..., TorchEngine]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads engines as on a GPU: kernels, weights, states, and rows of one call."""
    monkeypatch.setattr(followers, "records_on", on_device)
    monkeypatch.setattr(foreign_load, "kind_of", lambda _: Gpu())
    monkeypatch.setattr(nn.Linear, "forward", by_row)

    def load(model: Path, graphs: CountedGraphs | None = None, **options: Any) -> TorchEngine:
        make = None if graphs is None else lambda _: graphs
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": NUM_BLOCKS}
        quiet = {"progress": lambda _: None, "on_plan": lambda _: None}
        return load_engine(
            str(model),
            model_impl="transformers",
            max_model_len=48,
            num_threads=1,
            make_graphs=make,
            max_graph_tokens=MAX_GRAPH_SEQS,
            **{**sizes, **quiet, **options},
        )

    with kernels_on_cpu():
        yield load


@dataclass
class Pair:
    """Engines that differ in nothing but graphs, with the KV and states of TEXTS."""

    eager: TorchEngine
    replayed: TorchEngine
    graphs: CountedGraphs

    def both(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.eager.logits(batch), self.replayed.logits(batch)

    def check_same(self, batch: Batch) -> None:
        wanted, got = self.both(batch)
        assert torch.equal(got, wanted)
        assert torch.equal(self.replayed.kv.tensor, self.eager.kv.tensor)
        if STATE in self.eager.kv.records:
            one, other = (each.kv.records[STATE] for each in (self.eager, self.replayed))
            num_slots = one.slots.num_slots
            assert torch.equal(one.data[:num_slots], other.data[:num_slots])


def table_of(index: int) -> range:
    return range(4 * index, 4 * index + 4)


def one_token_each(indices: Sequence[int], step: int = 0) -> Batch:
    """A decode step of some sequences of TEXTS. step: tokens of each before it."""
    parts = []
    for index in indices:
        length = len(TEXTS[index]) + step
        row = SampleRow(0, GREEDY, (5,) * (length + 1), len(TEXTS[index]))
        token = (11 * index + 7 * step + 1) % 90
        parts.append(SequenceSlice((token,), length, table_of(index), (row,), len(TEXTS[index])))
    return Batch(tuple(parts))


@pytest.fixture
def pair(request: pytest.FixtureRequest, load: Load, tmp_path: Path) -> Pair:
    path, graphs = make_checkpoint(tmp_path, request.param), CountedGraphs(CPU)
    found = Pair(load(path), load(path, graphs), graphs)
    for engine in (found.eager, found.replayed):
        for table in engine.kv.slot_tables.values():
            table.of_block[:] = array("q", range(NUM_BLOCKS))
        for index, text in enumerate(TEXTS):
            row = SampleRow(len(text) - 1, GREEDY, (), 0)
            part = SequenceSlice(tuple(text), 0, table_of(index), (row,), len(text))
            engine.logits(Batch((part,)))
    return found


@pytest.mark.parametrize("pair", [*WITH_STATES, *DENSE], indirect=True)
def test_a_recorded_step_has_the_bits_of_an_eager_one(pair: Pair) -> None:
    """A step of as many rows: torch's operations may depend on how many there are."""
    num_before = pair.graphs.num_replays
    for step, indices in enumerate(([0, 1, 2, 3], [3, 1, 2, 0])):
        pair.check_same(one_token_each(indices, step))
    pair.check_same(one_token_each([1, 3], 2))
    pair.check_same(one_token_each([3], 3))
    assert pair.graphs.num_replays == num_before + 4


@pytest.mark.parametrize("pair", WITH_STATES[:2], indirect=True)
def test_padding_is_in_the_place_of_a_sequence_and_changes_none(pair: Pair) -> None:
    """Rows have the bits of those beside another sequence; a step is thrown away and run again."""
    wanted = pair.eager.logits(one_token_each([0, 1, 2, 3]))
    eager, memory = (each.kv.records[STATE] for each in (pair.eager, pair.replayed))
    before = memory.data.clone()
    got = pair.replayed.logits(one_token_each([0, 1, 2]))
    assert pair.graphs.num_replays == 1
    assert torch.equal(got, wanted[:3])
    slots = [4 * index for index in range(3)]
    assert torch.equal(memory.data[slots], eager.data[slots])
    read, written = memory.padding
    for slot in set(range(len(before))) - set(slots):
        for at in range(2):
            if 2 * slot + at != written:
                assert torch.equal(memory.data[slot, at], before[slot, at])
    assert not memory.data[divmod(read, 2)].any()
    assert memory.data[divmod(written, 2)].any()


@pytest.mark.parametrize("pair", ["lfm2"], indirect=True)
def test_what_does_not_go_on_by_a_token_runs_eagerly(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """A sequence's first token, and a chunk at the end of a prompt: no reason to report."""
    (going_on,) = one_token_each([0]).slices
    row = SampleRow(0, GREEDY, (5,), 1)
    first = SequenceSlice((9,), 0, table_of(1), (row,), 1)
    chunk = SequenceSlice((9, 8), 2, table_of(1), (row._replace(offset=1),), 4)
    for part in (chunk, first):
        pair.check_same(Batch((going_on, part)))
    assert pair.graphs.num_replays == 0
    assert not caplog.records


@pytest.mark.parametrize("pair", DENSE[:1], indirect=True)
def test_drafts_of_models_without_states_are_verified_by_rows(pair: Pair) -> None:
    drafts, start = (7, 12, 33), len(TEXTS[0])
    rows = tuple(SampleRow(at, GREEDY, (5,) * (start + at), start) for at in range(3))
    verified = SequenceSlice(drafts, start, table_of(0), rows, start)
    num_before = pair.graphs.num_replays
    got = pair.replayed.logits(Batch((verified,)))
    assert pair.graphs.num_replays == num_before + 1
    alone = [
        verified._replace(token_ids=(token,), start=start + at, rows=(rows[0],))
        for at, token in enumerate(drafts)
    ]
    wanted = torch.cat([pair.eager.logits(Batch((part,))) for part in alone])
    torch.testing.assert_close(got, wanted)


NUM_TOKENS = 4
PROMPTS = TEXTS[:2]


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_tokens_after_a_handoff_are_those_of_transformers(
    name: str, load: Load, tmp_path: Path
) -> None:
    model, graphs = make_checkpoint(tmp_path, name), CountedGraphs(CPU)
    client, hub = SimClient(random.Random(0), [], []), LoopbackHub()
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "num_blocks": 12}
    own = SimShape(**limits, max_local_prefill_tokens=0, max_num_launches=1)
    given = load(model, graphs, **limits, block_size=own.block_size)
    client.decodes.append(SimDecode(hub, lambda: client.now, own, given_engine=given))
    prefill = SimShape(**limits, block_size=8, max_num_launches=1)
    given = load(model, **limits, block_size=8)
    client.prefills.append(SimPrefill(hub, lambda: client.now, prefill, given_engine=given))
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    specs = [
        SequenceSpec(f"r{index}", tuple(prompt), sampling, arrival_ns=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    client.waiting += specs
    client.run()
    client.quiet()
    assert not client.failed
    outputs = [client.output_of(Choice(spec.request_id, 0)) for spec in specs]
    assert outputs == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert "Committed" in client.seen
    assert graphs.num_replays > 0


def test_a_device_that_fails_to_record_runs_steps_eagerly(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDevice(CountedGraphs):
        def record(self, run: Callable[[], None]) -> Any:  # noqa: ARG002
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = make_checkpoint(tmp_path, "llama")
    eager, other = load(model), load(model, FullDevice(CPU))
    assert "operation by operation: enforce_eager" in caplog.text
    found = [token_ids(generate(each, PROMPTS, GREEDY, 2)) for each in (eager, other)]
    assert found[0] == found[1]
