"""Decode steps with LoRA adapters are replayed: rows of several adapters and of none in one graph,
which reads anew at each replay which row has which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import EngineFault
from baton.types import Sampling
from baton_kernels import linear
from baton_kernels.cpu.library import library
from bench.gpu.interpreter import kernels_on_cpu
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch import native_decoder
from engine.torch.engine import TorchEngine
from tests.kernels.interpreted.test_step_graphs import CountedGraphs, LinearByRow, fill
from tests.support.adapters import ATTENTION, MLP, make_adapter
from tests.support.engines import load_engine
from tests.support.tiny_models import Family, make_tiny_model

BLOCK_SIZE, NUM_BLOCKS, MAX_GRAPH_SEQS = 16, 16, 4
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
#: Family, its settings, and those of two adapters, which differ in rank and in what they change.
MODELS: dict[str, tuple[Family, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"rank": 4, "targets": ATTENTION + MLP}, {"targets": ("v_proj",)}),
    "both ends": (
        "gemma2",
        {"sliding_window": 11, "tie_word_embeddings": False, "final_logit_softcapping": 2.0},
        {"rank": 16, "targets": ("embed_tokens", "lm_head", "up_proj")},
        {"targets": ("down_proj",)},
    ),
    "latent": ("deepseek_v3", {}, {"rank": 12, "targets": LATENT}, {"targets": ("o_proj",)}),
}


@dataclass
class Engines:
    """plain: adds one adapter after the other, by the twins' products."""

    plain: TorchEngine
    replayed: TorchEngine
    graphs: CountedGraphs


@pytest.fixture(params=MODELS)
def engines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engines]:
    family, settings, *of_adapters = MODELS[request.param]
    model = make_tiny_model(tmp_path / "model", family, **settings)
    modules = {
        name: str(make_adapter(tmp_path / name, model, seed=seed, **own))
        for seed, (name, own) in enumerate(zip(("red", "blue"), of_adapters, strict=True))
    }
    monkeypatch.setattr(native_decoder, "can_run", lambda *_: False)
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    monkeypatch.setattr(linear, "onednn_has_bfloat16", lambda: False)
    monkeypatch.setattr(linear, "PlainLinear", LinearByRow)
    graphs = CountedGraphs(torch.device("cpu"))

    def load(**options: Any) -> TorchEngine:
        engine = load_engine(
            str(model),
            dtype="float32",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=60,
            num_threads=1,
            lora_modules=modules,
            **options,
        )
        fill(engine)
        return engine

    with kernels_on_cpu():
        replayed = load(make_graphs=lambda _: graphs, max_graph_tokens=MAX_GRAPH_SEQS)
        yield Engines(load(), replayed, graphs)


def part(place: int, adapter: str, start: int = 20) -> SequenceSlice:
    """The next token of sequence `place`."""
    row = SampleRow(0, Sampling(temperature=0.0), (5,) * (start + 1), start)
    table = (2 * place, 2 * place + 1)
    return SequenceSlice((7 + place,), start, table, (row,), start, adapter=adapter)


def steps(adapters: tuple[str, ...]) -> Batch:
    return Batch(tuple(part(place, adapter) for place, adapter in enumerate(adapters)))


def test_replayed_steps_add_what_eager_ones_do(engines: Engines) -> None:
    """Adapters change between replays of one graph, and nothing is recorded for that."""
    num_graphs = len(engines.graphs.graphs)
    seen = []
    for adapters in (("red", "", "blue"), ("blue", "red", ""), ("", "", "red"), ("blue",)):
        batch = steps(adapters)
        got, wanted = engines.replayed.logits(batch), engines.plain.logits(batch)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert got.argmax(-1).equal(wanted.argmax(-1))
        seen.append(got[0].clone())
    assert engines.graphs.num_replays == 4
    assert len(engines.graphs.graphs) == num_graphs
    assert not seen[0].equal(seen[1])
    assert not seen[0].equal(seen[2])


def test_no_adapter_changes_another_sequence(engines: Engines) -> None:
    """A row has the bits that it has alone, and without an adapter those of steps without any."""
    together = engines.replayed.logits(steps(("red", "", "blue"))).clone()
    alone = [
        engines.replayed.logits(Batch((part(place, adapter),))).clone()
        for place, adapter in enumerate(("red", "", "blue"))
    ]
    assert engines.graphs.num_replays == 4
    if library() is not None:
        assert torch.equal(together, torch.cat(alone))
    else:
        torch.testing.assert_close(together, torch.cat(alone))
    # Of the graphs without adapters, as many as with them, one has run.
    plain = [graph.num_replays for graph in engines.graphs.graphs[1::2]]
    assert sum(plain) == 1


def test_a_chunk_of_a_prompt_has_the_same_additions(engines: Engines) -> None:
    """Steps beside a prompt run eagerly, with all adapters at once, too."""
    prompt = part(3, "blue", 0)._replace(token_ids=(9, 8, 7), rows=())
    batch = Batch((part(0, "red"), part(1, ""), prompt))
    got, wanted = engines.replayed.logits(batch), engines.plain.logits(batch)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert engines.graphs.num_replays == 0
    replayed = engines.replayed.logits(Batch((part(0, "red"), part(1, ""))))
    assert engines.graphs.num_replays == 1
    if library() is not None:
        assert torch.equal(replayed, got)


def test_an_unknown_adapter_is_its_sequences_fault(engines: Engines) -> None:
    with pytest.raises(EngineFault, match="'green' is not loaded") as failed:
        engines.replayed.logits(steps(("red", "green")))
    assert failed.value.metadata["slices"] == "1"
