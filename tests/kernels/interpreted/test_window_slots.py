"""Windowed layers with slots of their own on the kernels that a GPU would run: recorded steps and
chunks of prompts, alone and after a handoff, give the tokens of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.types import Sampling, SequenceSpec
from baton_kernels import linear
from bench.gpu.interpreter import kernels_on_cpu
from engine.kv.groups.window import WINDOWED
from engine.torch import native_decoder
from engine.torch.engine import TorchEngine
from kv_transfer.transport.loopback import LoopbackHub
from tests.kernels.interpreted.test_step_graphs import CountedGraphs
from tests.support.engines import load_engine
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

WINDOW, NUM_TOKENS = 6, 6
CASES: dict[Family, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
    },
    "gpt_oss": {"num_hidden_layers": 2},
}
PROMPTS = [[5, 77, 200, 3, 9, 11] * 3, [40, 41, 42]]


def engine_of(model: Path, graphs: CountedGraphs, own: SimShape) -> TorchEngine:
    engine = load_engine(
        str(model),
        dtype="float32",
        num_blocks=own.num_blocks,
        block_size=own.block_size,
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        num_threads=1,
        frees_windows=True,
        make_graphs=lambda _: graphs,
        max_graph_seqs=2,
        on_plan=lambda _: None,
        progress=lambda _: None,
    )
    assert engine.kv.slot_tables[WINDOWED].num_slots < own.num_blocks
    return engine


@pytest.mark.parametrize(
    ("family", "is_split"),
    [("gemma3_text", False), ("gemma3_text", True), ("gpt_oss", True)],
)
def test_tokens_are_those_of_transformers(
    family: Family, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / family, family, sliding_window=WINDOW, **CASES[family])
    monkeypatch.setattr(native_decoder, "can_run", lambda *_: False)
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    monkeypatch.setattr(linear, "onednn_has_bfloat16", lambda: False)
    client, hub = SimClient(random.Random(0), [], []), LoopbackHub()
    graphs, decode = (
        CountedGraphs(torch.device("cpu")),
        SimShape(
            num_blocks=20,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            max_local_prefill_tokens=0 if is_split else 100,
        ),
    )
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    specs = [
        SequenceSpec(f"r{index}", tuple(prompt), sampling, arrival_ns=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    with kernels_on_cpu():
        engine = engine_of(model, graphs, decode)
        client.decodes.append(SimDecode(hub, lambda: client.now, decode, given_engine=engine))
        prefill = SimShape(num_blocks=24, block_size=8, max_num_seqs=2, max_num_batched_tokens=8)
        given = engine_of(model, CountedGraphs(torch.device("cpu")), prefill) if is_split else None
        client.prefills.append(SimPrefill(hub, lambda: client.now, prefill, given_engine=given))
        client.waiting += specs
        client.run()
    client.quiet()
    assert not client.failed
    outputs = [client.output_of(Choice(spec.request_id, 0)) for spec in specs]
    assert outputs == greedy_outputs(model, PROMPTS, NUM_TOKENS)
    assert graphs.num_replays > 0
    assert ("Committed" in client.seen) == is_split
