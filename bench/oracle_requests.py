"""Requests to oracle engines, with known correct output."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.client import SamplingParams
from baton.types import Sampling
from engine.oracle import FULL_LAYERS, OracleLayers, oracle_tokens

#: Vocabulary of the oracle engine.
VOCAB_SIZE = 1000


@dataclass(frozen=True, slots=True)
class OracleRequest:
    """A request with a fixed number of tokens per choice. layers: of the workers' engines."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    num_tokens: int
    num_choices: int = 1
    layers: OracleLayers = FULL_LAYERS
    model: str = ""

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            n=self.num_choices,
        )

    def right_output(self) -> list[list[int]]:
        """Correct tokens of each choice."""
        sampling = Sampling(
            temperature=self.temperature, seed=self.seed, max_tokens=self.num_tokens
        )
        return [
            oracle_tokens(self.prompt, sampling, VOCAB_SIZE, choice, layers=self.layers)
            for choice in range(self.num_choices)
        ]


def draw_request(
    rng: random.Random,
    max_prompt_tokens: int,
    num_tokens: int,
    layers: OracleLayers = FULL_LAYERS,
) -> OracleRequest:
    """A random request: greedy or sampled, with one choice or, less often, two."""
    num_prompt_tokens = rng.randint(20, max_prompt_tokens)
    return OracleRequest(
        prompt=tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)),
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.getrandbits(63),
        num_tokens=num_tokens,
        num_choices=rng.choice([1, 1, 2]),
        layers=layers,
    )
