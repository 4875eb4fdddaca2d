"""A prompt's log probabilities are those of transformers' model, whichever chunks and whatever else
is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.types import Sample, Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.torch.engine import NUM_SCORED_ROWS, TorchEngine

MakeModel = Callable[..., Path]
MakeEngine = Callable[..., TorchEngine]

MODEL: dict[str, Any] = {"vocab_size": 40, "eos_token_id": 1, "max_position_embeddings": 128}
PROMPT = tuple((7 * i * i + 3 * i) % 40 for i in range(NUM_SCORED_ROWS + 20))
DRAWN = Sampling(temperature=0.0, logprobs=2)


def scored(first: int, end: int, sampling: Sampling) -> tuple[SampleRow, ...]:
    return tuple(
        SampleRow(
            at - first, sampling, PROMPT[: at + 1], len(PROMPT), scored_token_id=PROMPT[at + 1]
        )
        for at in range(first, min(end, len(PROMPT) - 1))
    )


def run(engine: TorchEngine, cut: int) -> list[Sample]:
    """Samples of a prompt in two chunks, with a draw at its end, beside another sequence."""
    sampling = Sampling(prompt_logprobs=3, logprobs=2)
    size = engine.spec.layout.block_size
    table = range(-(-len(PROMPT) // size))
    other = SequenceSlice(PROMPT[:5], 0, [len(table)], (SampleRow(4, DRAWN, PROMPT[:5], 5),))
    samples: list[Sample] = []
    for first, end in ((0, cut), (cut, len(PROMPT))):
        rows = scored(first, end, sampling)
        if end == len(PROMPT):
            rows += (SampleRow(end - first - 1, sampling, PROMPT, len(PROMPT)),)
        part = SequenceSlice(PROMPT[first:end], first, table, rows)
        mine, theirs = engine.forward(Batch((part, other)))
        samples += mine
        (alone,) = engine.forward(Batch((other,)))
        assert [one.token_id for one in theirs] == [one.token_id for one in alone]
    return samples


@pytest.mark.parametrize("cut", [1, 10, len(PROMPT) - 1])
def test_same_as_transformers(tiny_model: MakeModel, tiny_engine: MakeEngine, cut: int) -> None:
    from transformers import AutoModelForCausalLM

    *found, drawn = run(tiny_engine("llama", **MODEL), cut)
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", **MODEL), dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert [one.token_id for one in found] == list(PROMPT[1:])
    for at, one in enumerate(found):
        assert one.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(float(wanted[at, PROMPT[at + 1]]), abs=1e-4)
        best = wanted[at].topk(3).values.tolist()
        assert [value for _, value in one.logprobs.top] == pytest.approx(best, abs=1e-4)
        assert one.logprobs.rank == int((wanted[at] >= wanted[at, PROMPT[at + 1]]).sum())
    assert drawn.token_id == int(wanted[-1].argmax())
