"""Models that have layers with a state, on the kernels that a GPU would run, with states as tensors
that are copied in and out in the device's order: alone and after a handoff, the tokens of
transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from baton.types import KvLayout, Sampling, SequenceSpec
from bench.gpu.interpreter import kernels_on_cpu
from engine.kv.groups.state import STATE
from engine.kv.tensors.copy_order import CopyOrder
from engine.kv.tensors.device_states import DeviceStates
from engine.ranks import followers
from engine.torch.engine import TorchEngine
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.architectures import make_checkpoint
from tests.support.engines import load_engine
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from tests.support.transformers_greedy import greedy_outputs

NUM_TOKENS = 4
PROMPTS = [[5, 77, 20, 3, 9] * 2, [40, 41]]


def on_device(
    _device: torch.device, layout: KvLayout, num_blocks: int, num_slots: int, order: CopyOrder
) -> dict[int, DeviceStates]:
    return {STATE: DeviceStates(layout, num_blocks, num_slots, torch.device("cpu"), order)}


def engine_of(model: Path, own: SimShape) -> TorchEngine:
    return load_engine(
        str(model),
        model_impl="transformers",
        num_blocks=own.num_blocks,
        block_size=own.block_size,
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        num_threads=1,
        on_plan=lambda _: None,
        progress=lambda _: None,
    )


@pytest.mark.parametrize(
    ("name", "is_split"), [("lfm2", False), ("lfm2", True), ("qwen3_next", True)]
)
def test_tokens_are_those_of_transformers(
    name: str, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path, name)
    monkeypatch.setattr(followers, "records_on", on_device)
    client, hub = SimClient(random.Random(0), [], []), LoopbackHub()
    decode = SimShape(
        num_blocks=12,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_local_prefill_tokens=0 if is_split else 100,
        max_num_launches=1,
    )
    prefill = SimShape(
        num_blocks=12, block_size=8, max_num_seqs=2, max_num_batched_tokens=8, max_num_launches=1
    )
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    specs = [
        SequenceSpec(f"r{index}", tuple(prompt), sampling, arrival_ns=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    with kernels_on_cpu():
        engine = engine_of(model, decode)
        assert isinstance(engine.kv.records[STATE], DeviceStates)
        client.decodes.append(SimDecode(hub, lambda: client.now, decode, given_engine=engine))
        given = engine_of(model, prefill) if is_split else None
        client.prefills.append(SimPrefill(hub, lambda: client.now, prefill, given_engine=given))
        client.waiting += specs
        client.run()
    client.quiet()
    assert not client.failed
    outputs = [client.output_of(Choice(spec.request_id, 0)) for spec in specs]
    assert outputs == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert ("Committed" in client.seen) == is_split
