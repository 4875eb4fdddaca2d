"""Decode steps that are replayed give what they give when run eagerly, to the bit, on the kernels
that a GPU would run.

Replaying is calling here: what is tested is that a recorded step reads nothing but its buffers, and
that padding does no harm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.types import Sampling
from baton_kernels import linear
from baton_kernels.cpu.library import library
from baton_kernels.gpu import attention_plan
from bench.gpu.interpreter import kernels_on_cpu
from engine.cuda.graph_device import CalledGraphs, Graph
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch import native_decoder
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate, generate_ahead, token_ids
from tests.support.engines import load_engine
from tests.support.tiny_models import Family, make_tiny_model

#: Keys per program: a fourth of a GPU's, for sequences of as many parts.
SPLIT_TOKENS = 128
MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 180, 16, 64
MAX_GRAPH_SEQS = 4
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
MODELS: dict[str, tuple[Family, str, dict[str, Any]]] = {
    "llama": ("llama", "auto", {}),
    "window": ("mistral", "auto", {"sliding_window": 140}),
    "some windows": (
        "qwen2",
        "auto",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "norms, int8 KV": ("qwen3", "int8", {}),
    "latent": ("deepseek_v3", "auto", {}),
    "latent, int8 KV": ("deepseek_v3", "int8", {}),
    "dynamic RoPE": (
        "llama",
        "auto",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 80},
    ),
}


class CountedGraph:
    """A graph, and how often it was replayed."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._graph.replay()


class NoHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: waiting for a result, and numbers that come from the
    host."""

    REFUSED = frozenset(
        {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh", "masked_select"}
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, f"a recorded step calls {name}"
        return func(*args, **(kwargs or {}))


class CountedGraphs(CalledGraphs):
    """All graphs that were recorded, each of what a device can do by itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.graphs: list[CountedGraph] = []

    def record(self, run: Callable[[], None]) -> CountedGraph:
        with NoHost():
            graph = super().record(run)
        self.graphs.append(CountedGraph(graph))
        return self.graphs[-1]

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


class LinearByRow(linear.PlainLinear):
    """A weight as a GPU has it, which kernels of several layers' products read, too; and a row of
    the product has the same bits among any others, as padded steps need."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        y = (x[:, None].float() * self.weight.float()).sum(-1)
        y = y if self.bias is None else y + self.bias
        return linear.finish(y.to(x.dtype), residual, out_dtype)


@dataclass
class Pair:
    """Engines that differ in nothing but graphs."""

    eager: TorchEngine
    replayed: TorchEngine
    graphs: CountedGraphs


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    family, kv_cache_dtype, overrides = MODELS[getattr(request, "param", "llama")]
    settings = {"max_position_embeddings": 1024, **overrides}
    path = make_tiny_model(tmp_path / "model", family, **settings)
    monkeypatch.setattr(native_decoder, "can_run", lambda *_: False)
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    monkeypatch.setattr(linear, "onednn_has_bfloat16", lambda: False)
    monkeypatch.setattr(linear, "PlainLinear", LinearByRow)
    monkeypatch.setattr(attention_plan, "SPLIT_TOKENS", SPLIT_TOKENS)
    graphs = CountedGraphs(torch.device("cpu"))

    def load(**options: Any) -> TorchEngine:
        engine = load_engine(
            str(path),
            kv_cache_dtype=kv_cache_dtype,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=min(MAX_MODEL_LEN, 4 * settings["max_position_embeddings"]),
            num_threads=1,
            **options,
        )
        fill(engine)
        return engine

    with kernels_on_cpu():
        replayed = load(make_graphs=lambda _: graphs, max_graph_tokens=MAX_GRAPH_SEQS)
        yield Pair(load(), replayed, graphs)


def fill(engine: TorchEngine) -> None:
    """KV of sequences that nobody computed."""
    generator = torch.Generator().manual_seed(1)
    if engine.kv.scales is None:
        engine.kv.tensor.normal_(generator=generator)
    else:
        engine.kv.tensor.random_(-127, 128, generator=generator)
        engine.kv.scales.uniform_(0.0, 0.02, generator=generator)


def decode_batch(rng: random.Random, num_seqs: int, most: int) -> Batch:
    """Sequences of random lengths up to `most`; tables, longer than they need be, are of random
    blocks, none of which two share."""
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    parts = []
    for _ in range(num_seqs):
        edges = (SPLIT_TOKENS - 1, SPLIT_TOKENS, most - 1)
        start = rng.choice((0, rng.randrange(20), rng.randrange(most), *edges)) % most
        width = start // BLOCK_SIZE + 1 + rng.randrange(3)
        table, blocks = blocks[:width], blocks[width:]
        num_prompt_tokens = rng.randrange(1, start + 30)
        row = SampleRow(0, Sampling(temperature=0.0), (5,) * (start + 1), num_prompt_tokens)
        token = rng.randrange(250)
        parts.append(SequenceSlice((token,), start, table, (row,), num_prompt_tokens))
    return Batch(tuple(parts))


def check_same(pair: Pair, batch: Batch) -> None:
    wanted, got = pair.eager.logits(batch), pair.replayed.logits(batch)
    if library() is not None:
        assert torch.equal(got, wanted)
        assert torch.equal(pair.replayed.kv.tensor, pair.eager.kv.tensor)
    else:
        # torch's matrix products depend on the number of rows.
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("pair", MODELS, indirect=True)
def test_same_bits_over_random_batches(pair: Pair) -> None:
    rng = random.Random(7)
    most = pair.eager.spec.max_model_len
    for num_seqs in (1, 3, 2, 1):
        check_same(pair, decode_batch(rng, num_seqs, most))
    assert pair.graphs.num_replays == 4
    assert sum(graph.num_replays > 0 for graph in pair.graphs.graphs) > 2


def test_what_is_no_plain_decode_step_runs_eagerly(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(8)
    (one, two) = decode_batch(rng, 2, 100).slices
    row = one.rows[0]
    prefill = one._replace(token_ids=(1, 2), start=0)
    others = (
        Batch((prefill._replace(rows=(row._replace(offset=1),)), two)),
        Batch((one._replace(rows=()), two)),
        Batch((one._replace(rows=(row._replace(scored_token_id=3),)), two)),
        Batch(()),
        decode_batch(rng, MAX_GRAPH_SEQS + 1, 100),
        decode_batch(rng, MAX_GRAPH_SEQS + 1, 100),
    )
    for batch in others:
        check_same(pair, batch)
    assert pair.graphs.num_replays == 0
    # Once for each reason: a scored token, and too many sequences.
    assert sum("without a graph" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("pair", ["llama", "some windows", "latent", "dynamic RoPE"], indirect=True)
def test_verified_tokens_have_the_bits_of_the_same_tokens_decoded_alone(pair: Pair) -> None:
    """Three tokens of one sequence, over an edge of its blocks, beside one of another that draws
    twice."""
    drafts = (7, 120, 33)
    sampling = Sampling(temperature=0.0)
    rows = tuple(SampleRow(at, sampling, (5,) * (62 + at), 40) for at in range(3))
    verified = SequenceSlice(drafts, 62, (9, 3, 11, 4, 20, 21), rows, 40)
    row = SampleRow(0, sampling, (5,) * 10, 9)
    twice = SequenceSlice((50,), 9, (30,), (row, row), 9)
    got = pair.replayed.logits(Batch((verified, twice)))
    assert pair.graphs.num_replays == 1
    alone = [
        verified._replace(token_ids=(token,), start=62 + at, rows=(rows[at]._replace(offset=0),))
        for at, token in enumerate(drafts)
    ]
    wanted = torch.cat([pair.eager.logits(Batch((part,))) for part in (*alone, twice)])
    assert torch.equal(pair.replayed.kv.tensor, pair.eager.kv.tensor) or library() is None
    if library() is not None:
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got, wanted)


def test_layers_are_told_of_once_and_in_order(pair: Pair) -> None:
    told: list[tuple[int, int]] = []
    batch = decode_batch(random.Random(9), 2, 100)
    pair.replayed.forward(batch, lambda first, count: told.append((first, count)))
    assert pair.graphs.num_replays == 1
    num_layers = pair.replayed.spec.layout.num_layers
    assert [layer for first, count in told for layer in range(first, first + count)] == list(
        range(num_layers)
    )


def test_same_answers(pair: Pair) -> None:
    """Prompts in chunks, then decode steps, each on the tokens of the one before."""
    prompts = [[5, 77, 200, 3] * 3, [9], list(range(40, 51))]
    samplings = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.5, seed=7, top_k=40),
        Sampling(temperature=2.0, seed=8, top_p=0.8),
    ]
    answers = [
        token_ids(generate(engine, prompts, samplings, 3, chunk_tokens=5))
        for engine in (pair.eager, pair.replayed)
    ]
    assert answers[0] == answers[1]
    num_replays = pair.graphs.num_replays
    assert num_replays > 0
    assert token_ids(generate_ahead(pair.replayed, prompts, samplings, 3)) == answers[0]
    assert pair.graphs.num_replays == num_replays + 2
