"""Ranks that each record their decode steps replay them together: the tokens of one rank that runs
them op by op, on the kernels that GPUs would run.

Replaying is calling here, ranks are threads, and gloo is in NCCL's place: what is tested is that
all ranks record and replay the same shapes, in an order in which they meet, and that what they do
in a step needs no host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from baton.types import Sampling
from baton_kernels import linear
from bench.gpu.interpreter import kernels_on_cpu
from engine import native_rank
from engine.interface import Batch
from engine.kv.interface import shared_slots
from engine.ranks import process_groups, start
from engine.ranks.process_groups import NcclRanks
from engine.ranks.team import RankTeam
from engine.torch import native_decoder
from engine.torch.engine import TorchEngine
from tests.kernels.interpreted.test_step_graphs import CountedGraphs, LinearByRow
from tests.support.drive_engine import generate, token_ids, whole_prompt
from tests.support.engines import load_engine
from tests.support.rank_threads import start_thread
from tests.support.tiny_models import Family, make_tiny_model

CPU = torch.device("cpu")
PROMPTS = [[5, 77, 200], [9]]
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
SAMPLINGS = [Sampling(), Sampling(temperature=1.5, seed=7, top_k=40)]


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Why ranks could not go on. As on GPUs: weights, kernels, and a backend that sums."""
    monkeypatch.setattr(native_decoder, "can_run", lambda *_: False)
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    monkeypatch.setattr(linear, "onednn_has_bfloat16", lambda: False)
    monkeypatch.setattr(linear, "PlainLinear", LinearByRow)
    monkeypatch.setitem(process_groups._RANKS, "gloo", NcclRanks)
    # The interpreter patches Triton's language while a kernel runs: one at a time.
    call, lock = interpreter.GridExecutor.__call__, threading.Lock()

    def call_alone(self: Any, *args: Any, **options: Any) -> None:
        with lock:
            call(self, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call_alone)
    found: list[str] = []
    monkeypatch.setattr(
        start, "RankTeam", partial(RankTeam, start=start_thread, on_loss=found.append)
    )
    with kernels_on_cpu():
        yield found


@pytest.mark.parametrize(
    ("family", "degrees", "is_recorded"),
    [
        ("llama", {"tensor_parallel_size": 2}, True),
        ("llama", {"tensor_parallel_size": 2, "tensor_parallel_cut": "sums"}, True),
        ("deepseek_v3", {"tensor_parallel_size": 2}, True),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, False),
        ("llama", {"pipeline_parallel_size": 2}, False),
    ],
)
def test_all_ranks_replay_what_each_has_recorded(
    family: Family,
    degrees: dict[str, Any],
    is_recorded: bool,
    losses: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that count rows of experts on the host, or are one stage's, are not recorded."""
    path = make_tiny_model(tmp_path, family)
    first, others = CountedGraphs(CPU), CountedGraphs(CPU)
    monkeypatch.setattr(native_rank, "CalledGraphs", lambda _: others)

    def load(**options: Any) -> TorchEngine:
        return load_engine(str(path), num_blocks=16, max_model_len=64, num_threads=1, **options)

    one = load()
    two = load(
        **degrees,
        distributed_backend="gloo",
        make_graphs=lambda _: first,
        max_graph_tokens=2,
    )
    wanted, got = (token_ids(generate(each, PROMPTS, SAMPLINGS, 4)) for each in (one, two))
    two.close()
    assert got == wanted
    # The prompts' step has drawn the first token.
    assert first.num_replays == others.num_replays == 3 * is_recorded
    assert len(first.graphs) == len(others.graphs)
    assert bool(first.graphs) == is_recorded
    assert not losses


def test_windowed_layers_have_slots_on_all_ranks(
    losses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path, "qwen2", **WINDOWS)
    first, others = CountedGraphs(CPU), CountedGraphs(CPU)
    monkeypatch.setattr(native_rank, "CalledGraphs", lambda _: others)
    sizes = {"num_blocks": 16, "block_size": 4, "max_model_len": 64, "num_threads": 1}
    one = load_engine(str(path), **sizes)
    two = load_engine(
        str(path),
        **sizes,
        tensor_parallel_size=2,
        distributed_backend="gloo",
        make_graphs=lambda _: first,
        max_graph_tokens=2,
        frees_windows=True,
        max_num_seqs=2,
        max_num_batched_tokens=8,
    )
    assert not one.kv.slot_tables
    wanted = token_ids(generate(one, PROMPTS, SAMPLINGS, 4))
    with shared_slots(two.kv):
        got = token_ids(generate(two, PROMPTS, SAMPLINGS, 4))
    assert two.kv.slot_tables
    two.close()
    assert got == wanted
    assert first.num_replays == others.num_replays == 3
    assert not losses


def test_ranks_of_a_context_exchange_the_kv_of_each_layer(
    losses: list[str], tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path, "llama")
    prompt = tuple(7 * i % 250 for i in range(70))
    batch = Batch((whole_prompt(prompt, Sampling(), range(5)),))
    one, two = (
        load_engine(
            str(path),
            num_blocks=16,
            max_model_len=128,
            num_threads=1,
            distributed_backend="gloo",
            context_parallel_size=size,
            kv_service=__name__,
        )
        for size in (1, 2)
    )
    wanted, got = one.logits(batch), two.logits(batch)
    two.close()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert not losses


def serve(_link: Any, _make_pool: Any, _host: str, _marks: Any) -> None:
    """The service of a rank's KV here: none."""
