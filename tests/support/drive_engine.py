"""The smallest loop that serves sequences on an engine: no scheduler, just chunks and steps."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.interface import Batch, Engine, SampleRow, SequenceSlice
from baton.types import Sample, Sampling


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    num_tokens: int,
    *,
    chunk_tokens: int = 1 << 30,
    first_block: int = 0,
) -> list[list[Sample]]:
    """`num_tokens` samples for each prompt, all in one batch per step; prompts go in by chunks of `chunk_tokens`.

    Blocks are taken from `first_block` on, and each table is in descending order, so that order cannot be relied on.
    """
    settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    size = engine.spec.layout.block_size
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    outputs: list[list[Sample]] = [[] for _ in prompts]
    tables = []
    for prompt in prompts:
        count = -(-(len(prompt) + num_tokens) // size)
        tables.append(list(range(first_block, first_block + count))[::-1])
        first_block += count
    while running := [i for i in range(len(prompts)) if len(outputs[i]) < num_tokens]:
        slices = []
        for i in running:
            new = tuple(tokens[i][computed[i] : computed[i] + chunk_tokens])
            computed[i] += len(new)
            row = SampleRow(len(new) - 1, settings[i], tuple(tokens[i]), len(prompts[i]))
            rows = (row,) if computed[i] == len(tokens[i]) else ()
            start = computed[i] - len(new)
            slices.append(SequenceSlice(new, start, tables[i], rows, len(prompts[i])))
        for i, samples in zip(running, engine.forward(Batch(tuple(slices))), strict=True):
            outputs[i] += samples
            tokens[i] += [sample.token_id for sample in samples]
    return outputs


def token_ids(outputs: Sequence[Sequence[Sample]]) -> list[list[int]]:
    return [[sample.token_id for sample in output] for output in outputs]
