"""Which samples a sequence wants of a chunk of its tokens: alike in both tiers."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.interface import SampleRow
from baton.types import SequenceSpec


def wants_prompt_logprobs(spec: SequenceSpec) -> bool:
    """Whether the prompt's log probabilities are still to be told; cached KV cannot tell them."""
    return spec.sampling.prompt_logprobs >= 0 and not spec.output_token_ids


def num_scored_rows(spec: SequenceSpec, start: int, num_new: int) -> int:
    """Rows that scored_rows gives for the same chunk."""
    return len(_scored_positions(spec, start, num_new))


def _scored_positions(spec: SequenceSpec, start: int, num_new: int) -> range:
    """Positions of a chunk that tell of the prompt's next token."""
    if not wants_prompt_logprobs(spec):
        return range(0)
    return range(start, min(start + num_new, len(spec.prompt_token_ids) - 1))


def scored_rows(spec: SequenceSpec, start: int, num_new: int) -> tuple[SampleRow, ...]:
    """Rows that score the prompt's tokens after those of a chunk [start, start + num_new); none if
    nobody asked."""
    positions = _scored_positions(spec, start, num_new)
    if not positions:
        return ()
    prompt = spec.prompt_token_ids
    return tuple(
        SampleRow(
            offset=position - start,
            sampling=spec.sampling,
            # Penalties do not apply, and one copy of the prompt per token is quadratic.
            token_ids=(),
            num_prompt_tokens=len(prompt),
            scored_token_id=prompt[position + 1],
        )
        for position in positions
    )


def first_rows(
    spec: SequenceSpec,
    offset: int,
    token_ids: Sequence[int],
    allowed: bytes | None,
    num_undrawn_tokens: int = 0,
) -> tuple[SampleRow, ...]:
    """One row for each choice of the sequence after its last token, `offset` in its slice; one for
    a beam search.

    token_ids, num_undrawn_tokens: see SampleRow.
    """
    row = SampleRow(
        offset,
        spec.sampling,
        token_ids,
        len(spec.prompt_token_ids),
        spec.choice,
        allowed,
        num_undrawn_tokens=num_undrawn_tokens,
    )
    if spec.num_choices == 1 or spec.sampling.beam:
        return (row,)
    choices = range(spec.choice, spec.choice + spec.num_choices)
    return tuple(row._replace(choice=choice) for choice in choices)
