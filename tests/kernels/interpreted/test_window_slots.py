"""Windowed layers with slots of their own on the kernels that a GPU would run: recorded steps, with
drafts and without, and chunks of prompts, alone and after a handoff, give the tokens of
transformers."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
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
from worker_core.speculation.interface import DraftRequest, Proposal

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


@dataclass
class Foresight:
    """Drafts the tokens that come, except for a wrong one at the end. verified: drafts of each
    step. See Speculation."""

    outputs: Sequence[tuple[list[int], list[int]]]
    """Prompts, and what follows each."""
    verified: list[int] = field(default_factory=list)
    max_num_drafts: int = 3

    def is_due(self, key: Hashable) -> bool:  # noqa: ARG002
        return True

    def plan(
        self,
        requests: Sequence[DraftRequest],
        num_rows: int,  # noqa: ARG002
        max_num_drafts: int,
    ) -> list[Proposal]:
        proposals = []
        for request in requests:
            known, left = list(request.token_ids), min(max_num_drafts, request.max_num_drafts)
            (to_come,) = (
                (prompt + output)[len(known) :]
                for prompt, output in self.outputs
                if known == (prompt + output)[: len(known)]
            )
            drafts = to_come[: max(0, min(self.max_num_drafts, left))]
            drafts[-1:] = [(token + 1) % 200 for token in drafts[-1:]]
            max_num_drafts -= len(drafts)
            proposals.append(Proposal(tuple(drafts)))
        return proposals

    def record(self, key: Hashable, token_ids: Sequence[int]) -> None:  # noqa: ARG002
        return

    def on_step_end(self, num_rows: int, num_drafts: int) -> None:  # noqa: ARG002
        self.verified.append(num_drafts)

    def forget(self, key: Hashable) -> None:  # noqa: ARG002
        return


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
        max_graph_tokens=8,
        on_plan=lambda _: None,
        progress=lambda _: None,
    )
    assert engine.kv.slot_tables[WINDOWED].num_slots < own.num_blocks
    return engine


@pytest.mark.parametrize(
    ("family", "is_split", "has_drafts"),
    [
        ("gemma3_text", False, False),
        ("gemma3_text", True, False),
        ("gemma3_text", True, True),
        ("gpt_oss", True, False),
        ("gpt_oss", False, True),
    ],
)
def test_tokens_are_those_of_transformers(
    family: Family,
    is_split: bool,
    has_drafts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
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
    expected = greedy_outputs(model, PROMPTS, NUM_TOKENS)
    drafts = Foresight(list(zip(PROMPTS, expected, strict=True))) if has_drafts else None
    with kernels_on_cpu():
        engine = engine_of(model, graphs, decode)
        client.decodes.append(
            SimDecode(hub, lambda: client.now, decode, given_engine=engine, speculation=drafts)
        )
        prefill = SimShape(num_blocks=24, block_size=8, max_num_seqs=2, max_num_batched_tokens=8)
        given = engine_of(model, CountedGraphs(torch.device("cpu")), prefill) if is_split else None
        client.prefills.append(SimPrefill(hub, lambda: client.now, prefill, given_engine=given))
        client.waiting += specs
        client.run()
    client.quiet()
    assert not client.failed
    outputs = [client.output_of(Choice(spec.request_id, 0)) for spec in specs]
    assert outputs == expected
    assert graphs.num_replays > 0
    assert drafts is None or sum(drafts.verified) > 4
    assert not [each for each in caplog.records if "without a graph" in each.message]
    assert ("Committed" in client.seen) == is_split
