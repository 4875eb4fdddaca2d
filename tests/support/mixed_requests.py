"""Random requests that use everything a sequence may ask for, and what each would get if it were
alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from baton.types import BeamParams, EarlyStopping, Sampling, SequenceSpec
from engine.grammar import Grammar
from engine.oracle import (
    FULL_LAYERS,
    OracleLayers,
    oracle_tokens,
)
from tests.support.grammar_walks import allowed_after
from tests.support.oracle_reference import oracle_beams, oracle_prompt_logprobs
from tests.support.sim_client import Choice

VOCAB = 1000
#: What a third of the requests each ask for; engines of tests.support.sim_tiers have them.
ADAPTERS = ("red", "blue")


@dataclass(frozen=True)
class Expected:
    """An output of an undisturbed request. score: of a beam search."""

    choice: Choice
    token_ids: list[int]
    score: float | None = None


def draw_request(rng: random.Random, index: int, plain_share: float = 0.0) -> SequenceSpec:
    """A request of any kind; some begin like others. plain_share: how many may be launched before
    their last token is known."""
    prefix = [[1] * 20, [2] * 9, []][rng.randrange(3)]
    prompt = (*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))))
    beam = None
    if rng.random() < plain_share:
        sampling = draw_plain_sampling(rng)
    elif rng.random() < 0.2:
        beam = draw_beam(rng)
        sampling = draw_beam_sampling(rng, beam)
    else:
        sampling = draw_sampling(rng, prompt)
    return SequenceSpec(
        f"r{index}",
        prompt,
        sampling,
        tenant=rng.choice([b"", b"t" * 16]),
        priority=rng.choice([0, 0, 1]),
        arrival_ns=index,
        num_choices=beam.num_returned if beam else rng.choice([1, 1, 1, 2, 3]),
        adapter=("", *ADAPTERS)[index % 3],
    )


def draw_beam(rng: random.Random) -> BeamParams:
    width = rng.randint(1, 4)
    return BeamParams(
        width,
        length_penalty=rng.choice([0.0, 1.0, 1.5]),
        early_stopping=rng.choice(list(EarlyStopping)),
        num_returned=rng.randint(1, width),
    )


def draw_beam_sampling(rng: random.Random, beam: BeamParams) -> Sampling:
    grammar = rng.choice([b"", b"", draw_grammar(rng)])
    return Sampling(
        grammar=grammar,
        max_tokens=rng.randint(1, 8),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 20 if grammar else rng.choice([0, 20]))),
        beam=beam,
    )


def draw_sampling(rng: random.Random, prompt: tuple[int, ...]) -> Sampling:
    grammar = rng.choice([b"", b"", draw_grammar(rng)])
    return Sampling(
        grammar=grammar,
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.getrandbits(64),
        presence_penalty=rng.choice([0.0, 0.5]),
        logit_bias=rng.choice([{}, {7: 2.0}]),
        bad_words=() if grammar else rng.choice([(), ((prompt[-1], 5), (9,))]),
        max_tokens=rng.randint(1, 30),
        min_tokens=0 if grammar else rng.choice([0, 0, 1]),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 20)),
        logprobs=rng.choice([-1, -1, 2]),
        prompt_logprobs=rng.choice([-1, -1, -1, 1]),
    )


def draw_plain_sampling(rng: random.Random) -> Sampling:
    """Nothing but KV depends on a token that it chooses."""
    return Sampling(
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.getrandbits(64),
        logit_bias=rng.choice([{}, {7: 2.0}]),
        max_tokens=rng.randint(1, 30),
        min_tokens=rng.choice([0, 0, 3]),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 20)),
        logprobs=rng.choice([-1, -1, 2]),
    )


def draw_grammar(rng: random.Random) -> bytes:
    """One that an output of some tokens satisfies."""
    grammars = [
        Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3}),
        Grammar.regex("[a-f0-9]{2,12}(x|yz)?"),
        Grammar.lark('start: "(" start ")" | "x" start "y" | "z"'),
    ]
    return rng.choice(grammars).to_bytes()


def expected_outputs(spec: SequenceSpec, layers: OracleLayers = FULL_LAYERS) -> Iterator[Expected]:
    """What the request gets when it is the only one anywhere. layers: of all workers' models."""
    prompt, sampling = spec.prompt_token_ids, spec.sampling
    allowed, adapter = allowed_after(sampling), spec.adapter
    if sampling.beam:
        beams = oracle_beams(prompt, sampling, VOCAB, allowed, adapter, layers)
        for place, found in enumerate(beams):
            yield Expected(Choice(spec.request_id, place), list(found.token_ids), found.score)
        return
    for choice in range(spec.num_choices):
        tokens = oracle_tokens(prompt, sampling, VOCAB, choice, allowed, adapter, layers)
        yield Expected(Choice(spec.request_id, choice), tokens)


def num_prompt_logprobs(spec: SequenceSpec) -> int:
    """Prompt positions with reported log probabilities."""
    if spec.sampling.prompt_logprobs < 0:
        return 0
    return len(oracle_prompt_logprobs(spec.prompt_token_ids, spec.sampling, VOCAB))
