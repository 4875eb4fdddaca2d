"""Layers with a window beside others, on several ranks: each rank has a pool for either kind, so
that a handoff between any numbers of ranks moves the window of windowed layers and no more, and
what lies behind it is given back. Tokens are those of transformers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import EngineFault
from baton.events import Committed
from baton.types import Sampling, SequenceSpec
from baton_kernels.cpu.library import library
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.groups.window import WINDOWED, WindowSlots
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from engine.kv.tensors.paged import GroupedTensorPool
from engine.kv.tensors.ranks import ShardedKvPool
from engine.torch.engine import TorchEngine
from kv_transfer.transport.loopback import LoopbackHub
from tests.engine.ranks.conftest import LoadRanks
from tests.sim.test_held_windows import WatchedClient
from tests.support.sim_client import Choice, Stay
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

pytestmark = pytest.mark.slow

WINDOW, BLOCK, CHUNK, NUM_TOKENS = 11, 4, 16, 12
PROMPTS = [[7, 8, 9] * 20, [i * 7 % 250 for i in range(45)], [40, 9], list(range(60, 83))]
MODELS: dict[Family, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 4},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "query_pre_attn_scalar": 24,
    },
    "gpt_oss": {"num_hidden_layers": 3},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
}
SHAPE = SimShape(
    num_blocks=80,
    block_size=BLOCK,
    max_num_seqs=4,
    max_num_batched_tokens=CHUNK,
    enable_prefix_caching=False,
)
#: Slots of a sequence that decodes, and of one that comes with the window of its last full block.
MOST_DECODING = -(-WINDOW // BLOCK) + 2


class BytesClient(WatchedClient):
    """num_bytes: that handoffs to decode workers brought, by the length of the sequence."""

    num_bytes: dict[int, int]

    def take(self, handle: int, stay: Stay, event: object) -> None:
        if isinstance(event, Committed):
            self.num_bytes[stay.group.num_tokens] = event.transfer_bytes
        super().take(handle, stay, event)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path, request.param, sliding_window=WINDOW, **MODELS[request.param])


def load(load_ranks: LoadRanks, model: Path, size: int, **more: Any) -> TorchEngine:
    options = {
        "dtype": "float32",
        "num_blocks": SHAPE.num_blocks,
        "block_size": BLOCK,
        "max_num_seqs": SHAPE.max_num_seqs,
        "max_num_batched_tokens": CHUNK,
        "frees_windows": True,
        **more,
    }
    return load_ranks(model, size, **options)


def serve(
    decodes: list[TorchEngine], prefill: TorchEngine | None = None, move_rate: float = 0.0
) -> tuple[list[list[int]], BytesClient]:
    """What the prompts get. prefill: if none, decode workers compute prompts."""
    client, hub = BytesClient(random.Random(1), [], [], move_rate), LoopbackHub()
    client.most, client.num_bytes = Counter(), {}
    shape = SHAPE if prefill else replace(SHAPE, max_local_prefill_tokens=100)
    client.prefills.append(SimPrefill(hub, lambda: client.now, SHAPE, given_engine=prefill))
    for index, engine in enumerate(decodes):
        worker = SimDecode(hub, lambda: client.now, shape, f"d{index}", given_engine=engine)
        client.decodes.append(worker)
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    client.waiting += [
        SequenceSpec(f"r{index}", tuple(prompt), sampling, arrival_ns=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    client.run()
    client.quiet()
    assert not client.failed
    return [client.output_of(Choice(f"r{i}", 0)) for i in range(len(PROMPTS))], client


def test_both_groups_are_in_the_memory_of_all_ranks(model: Path, load_ranks: LoadRanks) -> None:
    engines = [load(load_ranks, model, size) for size in (1, 2, 4)]
    one = engines[0].kv
    assert isinstance(one, GroupedTensorPool)
    for engine in engines[1:]:
        kv = engine.kv
        assert isinstance(kv, GroupedTensorPool)
        assert (
            kv.slot_tables[WINDOWED].num_slots
            == one.slot_tables[WINDOWED].num_slots
            < SHAPE.num_blocks
        )
        for group, own in kv.pools.items():
            assert isinstance(own, ShardedKvPool)
            assert own.layout == one.pools[group].layout
            assert own.num_blocks == one.pools[group].num_blocks
        assert engine.spec == replace(engines[0].spec, max_num_launches=1)


def test_logits_and_kv_are_those_of_one_rank(model: Path, load_ranks: LoadRanks) -> None:
    logits, pools = [], []
    for size in (1, 2, 4):
        engine = load(load_ranks, model, size)
        kv = engine.kv
        assert isinstance(kv, GroupedTensorPool)
        slots, table = WindowSlots(kv.slot_tables[WINDOWED]), [9, 3, 30, 5, 12, 77]
        for block_id in reversed(table):
            slots.take(block_id)
        tokens = PROMPTS[1][:20]
        for start, end in ((0, 13), (13, 20)):
            rows = (SampleRow(end - start - 1, Sampling(), tokens[:end], 20),)
            part = SequenceSlice(tokens[start:end], start, table, rows, 20)
            logits.append(engine.logits(Batch((part,))))
        piece = KvRange(0, 20, 0, kv.layout.num_layers)
        out = bytearray(piece.num_bytes(kv.layout.token_layer_bytes))
        kv.pack(table, piece, memoryview(out))
        pools.append(bytes(out))
    for index, found in enumerate(logits[2:]):
        torch.testing.assert_close(found, logits[index % 2], rtol=1e-4, atol=1e-4)
        assert library() is None or torch.equal(found, logits[index % 2])
    assert library() is None or len(set(pools)) == 1


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
def test_a_handoff_moves_the_window_between_any_numbers_of_ranks(
    model: Path, sizes: tuple[int, int], load_ranks: LoadRanks, losses: list[str]
) -> None:
    prefill, decode = (load(load_ranks, model, size) for size in sizes)
    outputs, client = serve([decode], prefill)
    assert outputs == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    layout = decode.spec.layout
    num_windowed = len(layout.windowed_layers)
    assert 0 < num_windowed < layout.num_layers
    assert client.num_bytes == {
        len(prompt): (
            layout.num_layers * len(prompt)
            - num_windowed * groups_of(layout).whole_start(len(prompt))
        )
        * layout.token_layer_bytes
        for prompt in PROMPTS
    }
    assert groups_of(layout).whole_start(len(PROMPTS[0])) > WINDOW
    assert 0 < client.most["d0"] <= SHAPE.max_num_seqs * MOST_DECODING
    assert not losses


def test_one_worker_of_several_ranks_does_all(
    model: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    engines = [load(load_ranks, model, size) for size in (2, 1)]
    outputs, client = serve([engines[0]], None)
    assert outputs == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert not client.num_bytes
    assert not losses


def test_sequences_move_between_workers_of_other_numbers_of_ranks(
    model: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    prefill, *decodes = (load(load_ranks, model, size) for size in (1, 2, 1))
    outputs, client = serve(decodes, prefill, move_rate=0.2)
    assert outputs == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert client.seen >= {"Committed", "HandedOff", "Paused"}
    assert not losses


def test_a_slice_without_its_window_fails_alone_and_ranks_go_on(
    tmp_path: Path, load_ranks: LoadRanks, losses: list[str]
) -> None:
    """No rank is given such a step: it would be apart from the others for good."""
    engine = load(load_ranks, make_tiny_model(tmp_path, "gemma2", sliding_window=WINDOW), 2)
    slots = engine.kv.slot_tables[WINDOWED]
    WindowSlots(slots).take(9)
    row = SampleRow(0, Sampling(), (5,), 1)
    good, wrong = (SequenceSlice((5,), 0, (block_id,), (row,)) for block_id in (9, 8))
    expected = engine.forward(Batch((good,)))
    with pytest.raises(EngineFault, match="windowed") as caught:
        engine.forward(Batch((good, wrong)))
    assert caught.value.metadata["slices"] == "1"
    assert engine.forward(Batch((good,))) == expected
    assert not losses
