"""The smallest loop that serves sequences on an engine: no scheduler, just chunks and steps."""

from __future__ import annotations

from collections.abc import Sequence

from baton.types import Sample, Sampling
from engine.interface import FOLLOWING, Batch, Engine, SampleRow, SequenceSlice


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    num_tokens: int,
    *,
    chunk_tokens: int = 1 << 30,
    first_block: int = 0,
    adapters: Sequence[str] = (),
) -> list[list[Sample]]:
    """`num_tokens` samples for each prompt, all in one batch per step; prompts go in by chunks of
    `chunk_tokens`. adapters: one for each prompt, or none at all.

    Blocks are taken from `first_block` on, and each table is in descending order, so that order
    cannot be relied on.
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
            part = SequenceSlice(new, start, tables[i], rows, len(prompts[i]))
            slices.append(part._replace(adapter=adapters[i]) if adapters else part)
        for i, samples in zip(running, engine.forward(Batch(tuple(slices))), strict=True):
            outputs[i] += samples
            tokens[i] += [sample.token_id for sample in samples]
    return outputs


def whole_prompt(
    prompt: Sequence[int], sampling: Sampling, block_table: Sequence[int]
) -> SequenceSlice:
    """All of a prompt, and a row after it."""
    row = SampleRow(len(prompt) - 1, sampling, prompt, len(prompt))
    return SequenceSlice(prompt, 0, block_table, (row,), len(prompt))


def next_token(
    known: Sequence[int],
    num_prompt_tokens: int,
    sampling: Sampling,
    block_table: Sequence[int],
    follows: int,
) -> SequenceSlice:
    """The token after those known, which a row of the launch before draws, and a row after it."""
    row = SampleRow(0, sampling, known, num_prompt_tokens, num_undrawn_tokens=1)
    return SequenceSlice(FOLLOWING, len(known), block_table, (row,), num_prompt_tokens, follows)


def generate_ahead(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    num_tokens: int,
) -> list[list[Sample]]:
    """As generate, but each step is launched before the one before is collected.

    In every other step the sequences come in reverse order, so that they follow rows of other
    places.
    """
    size = engine.spec.layout.block_size
    width = -(-(max(map(len, prompts)) + num_tokens) // size)
    tables = [range(width * place, width * (place + 1)) for place in range(len(prompts))]
    known = [list(prompt) for prompt in prompts]
    outputs: list[list[Sample]] = [[] for _ in prompts]
    order = list(range(len(prompts)))
    parts = map(whole_prompt, prompts, samplings, tables)
    launched = engine.launch(Batch(tuple(parts)))
    for num_left in reversed(range(num_tokens)):
        after = order[::-1]
        following = [
            next_token(list(known[i]), len(prompts[i]), samplings[i], tables[i], order.index(i))
            for i in after
        ]
        ahead = engine.launch(Batch(tuple(following))) if num_left else None
        for place, (sample,) in zip(order, launched.samples(), strict=True):
            outputs[place].append(sample)
            known[place].append(sample.token_id)
        if ahead:
            launched, order = ahead, after
    return outputs


def token_ids(outputs: Sequence[Sequence[Sample]]) -> list[list[int]]:
    return [[sample.token_id for sample in output] for output in outputs]
