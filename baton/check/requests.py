"""The requests of a check: mixed lengths, shared prefixes, greedy and seeded sampling, all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.client import SamplingParams


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """One prompt, as token ids, and how it is sampled."""

    prompt: tuple[int, ...]
    params: SamplingParams


def draw_requests(
    num_requests: int, vocab_size: int, max_model_len: int, seed: int
) -> tuple[CheckRequest, ...]:
    """Requests that fit a model; equal arguments give equal requests."""
    rng = random.Random(seed)
    longest = min(600, max_model_len // 2)
    prefixes = [_tokens(rng, rng.randint(1, longest // 2), vocab_size) for _ in range(4)]
    return tuple(_draw(rng, prefixes, longest, vocab_size) for _ in range(num_requests))


def _draw(
    rng: random.Random, prefixes: list[tuple[int, ...]], longest: int, vocab_size: int
) -> CheckRequest:
    prefix = rng.choice(prefixes) if rng.random() < 0.4 else ()
    # Mostly short, some long: lengths of real traffic are skewed.
    length = min(longest - len(prefix), 1 + int(rng.expovariate(1 / (longest / 6))))
    prompt = prefix + _tokens(rng, max(1, length), vocab_size)
    return CheckRequest(prompt, _params(rng, rng.randint(1, 48)))


def _tokens(rng: random.Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(num_tokens))


def _params(rng: random.Random, max_tokens: int) -> SamplingParams:
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return SamplingParams(
        temperature=rng.choice([0.5, 0.8, 1.0, 1.3]),
        top_k=rng.choice([0, 20, 50]),
        top_p=rng.choice([1.0, 0.95, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        seed=rng.getrandbits(63),
        max_tokens=max_tokens,
    )
