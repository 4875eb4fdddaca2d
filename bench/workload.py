"""What is sent: requests with token ids, made from lengths. Pure, and the same for the same
seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from bench.recorded import TraceEntry, capped, scaled


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load. due_s: when it is sent, from the start of the load."""

    due_s: float
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


def synthetic_entries(
    num_requests: int, num_input_tokens: int, num_output_tokens: int, spread: float, rng: Random
) -> tuple[TraceEntry, ...]:
    """Requests whose lengths are uniform within `spread` (0..1, as a share) around the means, each
    at least 1."""
    if not 0 <= spread <= 1:
        raise ValueError(f"spread {spread}: give 0 to 1")

    def draw(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    return tuple(
        TraceEntry(0.0, draw(num_input_tokens), draw(num_output_tokens))
        for _ in range(num_requests)
    )


def fitted(
    entries: Iterable[TraceEntry], input_scale: float, output_scale: float, max_model_len: int
) -> tuple[TraceEntry, ...]:
    """The requests with scaled lengths that a model of this length takes."""
    return tuple(
        capped(scaled(entry, input_scale, output_scale), max_model_len) for entry in entries
    )


def requests_of(
    entries: Sequence[TraceEntry], due_s: Sequence[float], vocab_size: int, seed: int
) -> tuple[LoadRequest, ...]:
    """One request per entry; `due_s` has as many times as there are entries."""
    return tuple(
        LoadRequest(due, prompt_of(entry, index, vocab_size, seed), entry.num_output_tokens)
        for index, (entry, due) in enumerate(zip(entries, due_s, strict=True))
    )


def prompt_of(entry: TraceEntry, index: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Token ids below `vocab_size`: those of its blocks, and from where it has none, its own (by
    `index`).

    They depend on nothing else, so prompts share tokens exactly as far as their hash_ids agree.
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
