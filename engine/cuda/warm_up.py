"""Warm-up steps: compile a GPU's kernels, or load them from Triton's cache, before the first
request.

Triton compiles a kernel again for each tile, which depends on a sequence's number of new tokens,
and specialises integers that are 1 or multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.types import Sampling
from engine.interface import Batch, Engine, EngineSpec, SampleRow, SequenceSlice
from engine.kv.interface import shared_slots

#: Cached tokens before the new ones: more than one range of keys, so that results are merged
#: (kernels/baton_kernels/gpu/attention_plan.py). With more new tokens keys are not split, or are
#: merged in the same tiles.
_LONG_PREFIX = 2064
_MAX_AFTER_PREFIX = 128

#: Together they run every sampling kernel.
_SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1),
    Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    Sampling(logit_bias={0: 1.0}, min_tokens=2, stop_token_ids=frozenset({1})),
    Sampling(logprobs=2),
)


def token_counts(most: int) -> list[int]:
    """Numbers of new tokens, at most `most`: each power of two and its successor, so that every
    rounding up to a power of two, and multiples of 16, occur."""
    return sorted(
        {n for power in powers_of_two(most) for n in (power, power + 1) if n <= most} | {most}
    )


def powers_of_two(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [1 << bit for bit in range(max(0, most).bit_length())]


def warm_up_batches(
    spec: EngineSpec, max_num_batched_tokens: int, max_num_seqs: int
) -> Iterator[Batch]:
    """Batches to run in order on a new engine; they write arbitrary blocks, from the first on."""
    block_size = spec.layout.block_size
    longest = min(spec.max_model_len, spec.num_blocks * block_size)
    for count in token_counts(min(max_num_batched_tokens, longest)):
        yield Batch((_slice(count, 0, 0, block_size, Sampling()),))
    prefix = min(_LONG_PREFIX, longest // 2)
    for count in token_counts(min(_MAX_AFTER_PREFIX, max_num_batched_tokens, longest - prefix)):
        yield Batch((_slice(count, prefix, 0, block_size, Sampling()),))
    most = min(max_num_batched_tokens, max_num_seqs, spec.num_blocks)
    for num_seqs in token_counts(min(most, 2 * len(_SAMPLINGS))):
        chosen = [_SAMPLINGS[i % len(_SAMPLINGS)] for i in range(num_seqs)]
        yield Batch(tuple(_slice(1, 0, i, block_size, s) for i, s in enumerate(chosen)))
    # A prompt's chunk beside decoding sequences, one of them possibly long: their attention is
    # planned for each power of two of sequences.
    num_long = -(-(prefix + 1) // block_size)
    room = min(max_num_batched_tokens - 2, max_num_seqs - 1, spec.num_blocks - num_long - 1)
    for num_seqs in powers_of_two(room):
        chunk, *short = (
            _slice(2 - bool(i), 0, num_long + i, block_size, Sampling()) for i in range(num_seqs)
        )
        for start in (prefix, 0):
            yield Batch((chunk, _slice(1, start, 0, block_size, Sampling()), *short))
    for sampling in _SAMPLINGS:  # one row, and a batch in which all rows sample alike
        yield Batch((_slice(1, 0, 0, block_size, sampling),))


def _slice(
    num_new: int, start: int, first_block: int, block_size: int, sampling: Sampling
) -> SequenceSlice:
    end = start + num_new
    table = range(first_block, first_block + -(-end // block_size))
    row = SampleRow(num_new - 1, sampling, (0,) * end, end)
    return SequenceSlice((0,) * num_new, start, table, (row,), num_prompt_tokens=end)


def warm_up(
    engine: Engine,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Run all warm_up_batches, before any block has an owner. on_progress: called before each batch
    with (batches done, total). Raises as Engine.forward does."""
    batches = list(warm_up_batches(engine.spec, max_num_batched_tokens, max_num_seqs))
    with shared_slots(engine.kv):
        for number, batch in enumerate(batches):
            on_progress(number, len(batches))
            engine.forward(batch)
