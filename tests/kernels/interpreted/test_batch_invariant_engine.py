"""With --batch-invariant a row's bits on a GPU's kernels depend on its own sequence alone: not on
what is computed with it, nor on how its prompt was cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from baton.types import Sampling
from baton_kernels.attention_backends import batch_invariant
from baton_kernels.fixed_linear import FixedLinear
from baton_kernels.gpu import attention_plan
from bench.gpu.interpreter import kernels_on_cpu
from engine import load as loading
from engine.cuda.graph_device import CalledGraphs
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch import packed
from engine.torch.engine import TorchEngine
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model

BLOCK_SIZE, NUM_BLOCKS = 16, 40
#: Keys of an item, were they split: fewer than the sequence has.
SPLIT_TOKENS = 32
LENGTH = 50
#: Ends of the chunks that the prompt is computed in, and sequences that are computed with it.
CUTS = (((LENGTH,), 0), ((17, 33, 34, LENGTH), 3), ((LENGTH - 1, LENGTH), 1))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """As a GPU would have it, with graphs of up to four sequences."""
    path = make_tiny_model(tmp_path / "model", "qwen3", max_position_embeddings=1024)
    monkeypatch.setattr(loading, "_batch_invariant", lambda *_: batch_invariant())
    monkeypatch.setattr(packed, "pack_linear", lambda weight, bias, *_: FixedLinear(weight, bias))
    monkeypatch.setattr(attention_plan, "SPLIT_TOKENS", SPLIT_TOKENS)
    with kernels_on_cpu():
        return load_engine(
            str(path),
            batch_invariant=True,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=LENGTH + 20,
            num_threads=1,
            make_graphs=CalledGraphs,
            max_graph_tokens=4,
        )


def part(start: int, tokens: list[int], first_block: int) -> SequenceSlice:
    count = -(-(start + len(tokens)) // BLOCK_SIZE)
    table = range(first_block, first_block + count)
    known = (0,) * (start + len(tokens))
    row = SampleRow(len(tokens) - 1, Sampling(temperature=0.0), known, len(known))
    return SequenceSlice(tuple(tokens), start, table, (row,), len(known))


def test_logits_in_any_batch_and_any_chunks(engine: TorchEngine) -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(250) for _ in range(LENGTH + 1)]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    with kernels_on_cpu():
        for cuts, num_others in CUTS:
            begin = 0
            for end in cuts:
                # Beside it: sequences that decode, and a prompt.
                others = [part(i, [7 * i + 1], 20 + i) for i in range(num_others)]
                others += [part(0, [9] * 40, 30)] if num_others > 1 else []
                batch = Batch((*others, part(begin, tokens[begin:end], 0)))
                last = engine.logits(batch)[-1].clone()
                begin = end
            # A decode step, which is replayed.
            beside = [part(3 * i, [i], 20 + i) for i in range(num_others)]
            step = Batch((part(LENGTH, tokens[-1:], 0), *beside))
            found.append((last, engine.logits(step)[0].clone()))
            # And the same as the last of three tokens that are verified.
            verified = engine.logits(Batch((part(LENGTH - 2, tokens[-3:], 0), *beside)))
            assert torch.equal(verified[0], found[-1][1])
    for last, decoded in found[1:]:
        assert torch.equal(last, found[0][0])
        assert torch.equal(decoded, found[0][1])
