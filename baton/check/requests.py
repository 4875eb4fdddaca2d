"""Requests of a check: mixed lengths, shared prefixes, all sampling methods; drawn from one
seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.client import BeamSearch, SamplingParams, StructuredOutput


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """One prompt in token ids, with its sampling. model: an adapter; empty for the model."""

    prompt: tuple[int, ...]
    params: SamplingParams
    model: str = ""


#: Default maximum output tokens per choice.
MAX_TOKENS = 48
#: Maximum tokens of a prompt, unless long ones are asked for.
MAX_PROMPT_TOKENS = 600


def draw_requests(
    num_requests: int,
    vocab_size: int,
    max_model_len: int,
    seed: int,
    max_tokens: int = MAX_TOKENS,
    *,
    is_long: bool = False,
) -> tuple[CheckRequest, ...]:
    """Draw requests that fit a model, with at most `max_tokens` per choice. Deterministic. is_long:
    see draw_long_requests."""
    if is_long:
        return draw_long_requests(num_requests, vocab_size, max_model_len, seed, max_tokens)
    rng = random.Random(seed)
    longest = min(MAX_PROMPT_TOKENS, max_model_len // 2)
    max_tokens = min(max_tokens, max_model_len - longest)
    prefixes = [_tokens(rng, rng.randint(1, longest // 2), vocab_size) for _ in range(4)]
    return tuple(_draw(rng, prefixes, longest, vocab_size, max_tokens) for _ in range(num_requests))


def with_adapters(
    requests: Sequence[CheckRequest], adapters: Sequence[str], seed: int
) -> tuple[CheckRequest, ...]:
    """The requests, some of them of adapters."""
    rng = random.Random(seed)
    return tuple(replace(each, model=rng.choice(("", *adapters))) for each in requests)


def draw_long_requests(
    num_requests: int, vocab_size: int, max_model_len: int, seed: int, max_tokens: int
) -> tuple[CheckRequest, ...]:
    """Draw requests with prompts up to the model's length: the first as long as fits, the others of
    all magnitudes; every other one begins with an earlier prompt's beginning."""
    rng = random.Random(seed)
    max_tokens = min(max_tokens, max_model_len // 2)
    longest, requests = max_model_len - max_tokens, list[CheckRequest]()
    for index in range(num_requests):
        length = longest if not index else round(math.exp(rng.uniform(0, math.log(longest))))
        prefix = rng.choice(requests).prompt[: rng.randrange(length)] if index % 2 else ()
        prompt = prefix + _tokens(rng, length - len(prefix), vocab_size)
        num_new = rng.randint(1, max_tokens)
        is_short = length <= MAX_PROMPT_TOKENS
        draw = _params if is_short else rng.choice((_greedy, _sampled))
        requests.append(CheckRequest(prompt, draw(rng, num_new)))
    return tuple(requests)


def _draw(
    rng: random.Random,
    prefixes: list[tuple[int, ...]],
    longest: int,
    vocab_size: int,
    max_tokens: int,
) -> CheckRequest:
    prefix = rng.choice(prefixes) if rng.random() < 0.4 else ()
    # Mostly short, some long, like real traffic.
    length = min(longest - len(prefix), 1 + int(rng.expovariate(1 / (longest / 6))))
    prompt = prefix + _tokens(rng, max(1, length), vocab_size)
    return CheckRequest(prompt, _params(rng, rng.randint(1, max_tokens)))


def _tokens(rng: random.Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(num_tokens))


def _params(rng: random.Random, max_tokens: int) -> SamplingParams:
    kinds = (_greedy, _sampled, _choices, _beams, _structured, _scored)
    (kind,) = rng.choices(kinds, weights=(4, 4, 2, 1, 1, 1))
    return kind(rng, max_tokens)


def _greedy(rng: random.Random, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        repetition_penalty=rng.choice([1.0, 1.3]),
        bad_words=rng.choice([None, ["the", "return", "("]]),
    )


def _choices(rng: random.Random, max_tokens: int) -> SamplingParams:
    num_choices = rng.randint(2, 5)
    num_drawn = num_choices + rng.choice([0, 0, 2])
    return _sampled(rng, max_tokens).with_options(n=num_choices, best_of=num_drawn)


def _beams(rng: random.Random, max_tokens: int) -> SamplingParams:
    width = rng.randint(2, 4)
    return SamplingParams(
        n=rng.randint(1, width),
        beam_search=BeamSearch(width, length_penalty=rng.choice([0.5, 1.0])),
        max_tokens=min(max_tokens, 16),
    )


def _structured(rng: random.Random, max_tokens: int) -> SamplingParams:
    shape = rng.choice(
        [
            StructuredOutput(regex="[a-z]{3,12}( [a-z]{2,8}){0,4}"),
            StructuredOutput(choice=["red", "green", "blue", "ultramarine"]),
            StructuredOutput(
                json_schema={
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
                    "required": ["name", "size"],
                    "additionalProperties": False,
                }
            ),
        ]
    )
    return _sampled(rng, max_tokens).with_options(structured_output=shape)


def _scored(rng: random.Random, max_tokens: int) -> SamplingParams:
    return _sampled(rng, max_tokens).with_options(prompt_logprobs=2, logprobs=3)


def _sampled(rng: random.Random, max_tokens: int) -> SamplingParams:
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
