"""Requests with token ids made from lengths. Deterministic for a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from engine.plan.trace import TraceEntry


def fitted(
    entry: TraceEntry, input_scale: float, output_scale: float, max_model_len: int
) -> TraceEntry:
    """The request with scaled lengths, each at least 1, limited to the model's context: the output
    to half of it, the prompt to the rest. Blocks shrink with the prompt, so the shared part stays
    the same share. Raises ValueError for scales <= 0, and for max_model_len < 2."""
    if not (input_scale > 0 and output_scale > 0):
        raise ValueError("scales of lengths must be more than 0")
    if max_model_len < 2:
        raise ValueError(f"max_model_len {max_model_len}: give at least 2")
    num_output = max(1, min(round(entry.num_output_tokens * output_scale), max_model_len // 2))
    num_input = max(1, min(round(entry.num_input_tokens * input_scale), max_model_len - num_output))
    return replace(
        entry,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        block_tokens=max(1, round(entry.block_tokens * input_scale)),
    )


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load. due_s: send time, in seconds from the start of the load."""

    due_s: float
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


def synthetic_entries(
    num_requests: int, num_input_tokens: int, num_output_tokens: int, spread: float, rng: Random
) -> tuple[TraceEntry, ...]:
    """Requests with lengths uniform within `spread` (0..1, a share) of the means, each at least
    1."""
    if not 0 <= spread <= 1:
        raise ValueError(f"spread {spread}: give 0 to 1")

    def draw(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    return tuple(
        TraceEntry(0.0, draw(num_input_tokens), draw(num_output_tokens))
        for _ in range(num_requests)
    )


def requests_of(
    entries: Sequence[TraceEntry], due_s: Sequence[float], vocab_size: int, seed: int
) -> tuple[LoadRequest, ...]:
    """One request per entry, sent at the time of `due_s` with the same index."""
    return tuple(
        LoadRequest(due, prompt_of(entry, index, vocab_size, seed), entry.num_output_tokens)
        for index, (entry, due) in enumerate(zip(entries, due_s, strict=True))
    )


def prompt_of(entry: TraceEntry, index: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Token ids below `vocab_size`: those of its blocks, then its own (by `index`).

    They depend on nothing else, so prompts share exactly the tokens of their common hash_ids.
    """
    wanted = entry.num_input_tokens
    tokens: list[int] = []
    for name in entry.hash_ids:
        if len(tokens) >= wanted:
            break
        tokens += _tokens(f"{seed}/block/{name}", entry.block_tokens, vocab_size)
    tokens += _tokens(f"{seed}/own/{index}", max(0, wanted - len(tokens)), vocab_size)
    return tuple(islice(tokens, wanted))


def _tokens(key: str, num_tokens: int, vocab_size: int) -> list[int]:
    return Random(key).choices(range(vocab_size), k=num_tokens)
