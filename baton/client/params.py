"""Sampling and stopping parameters, as callers of the SDK write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Searches for the most probable outputs instead of sampling, with transformers' names and
    meanings.

    width: beams kept at each step, 1..64. length_penalty: -10..10; above 0 favours long outputs.
    early_stopping: with as many finished outputs as beams, end when none is likely to be beaten
    (False), at once (True), or when none can be ("never").
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on the output's text: exactly one of these. The server checks it, and names what
    is wrong with it."""

    json_schema: Mapping[str, Any] | str | None = None
    """A JSON document that this JSON Schema describes, its properties in the schema's order. A str
    is JSON, too."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A text that this regular expression, in Rust's syntax, matches as a whole."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text that the rule `start` of this grammar, in Lark's syntax, derives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop, with vLLM's names. None takes the server's default.

    Ranges are those of baton.v1.SamplingParams; the server checks them and names every wrong one.
    """

    n: int | None = None
    """Number of independent choices, 1..128; default 1."""
    temperature: float | None = None
    """Divides the logits; 0 is greedy. 0..100; default 1."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 keeps all. Default 0."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches this. (0, 1]; default 1."""
    min_p: float | None = None
    """Drop tokens less probable than this share of the best one. [0, 1]; default 0."""
    repetition_penalty: float | None = None
    """(0, 100]; default 1, neutral."""
    presence_penalty: float | None = None
    """-2..2; default 0, neutral."""
    frequency_penalty: float | None = None
    """-2..2; default 0, neutral."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids: -100..100."""
    min_tokens: int | None = None
    """Tokens to produce before a stop token may end the output. Default 0."""
    max_tokens: int | None = None
    """Most tokens to produce, at least 1. Default: what the model's context leaves."""
    stop: str | Sequence[str] | None = None
    """A string, or strings, that end the output."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output."""
    ignore_eos: bool | None = None
    """Whether to go on after the model's end-of-sequence tokens. Default False."""
    seed: int | None = None
    """Same seed, same request, same tokens. 0..2**64 - 1; default: drawn by the server."""
    logprobs: int | None = None
    """Alternatives reported per position, 0..20; default: no log probabilities."""
    include_stop_str_in_output: bool | None = None
    """Default False."""
    skip_special_tokens: bool | None = None
    """Default True."""
    best_of: int | None = None
    """Choices to produce, of which the n most probable per token are returned. n..128; default
    n."""
    prompt_logprobs: int | None = None
    """Alternatives reported per position of the prompt, 0..20; default: none are reported."""
    echo: bool | None = None
    """Whether the text begins with the prompt's. Default False."""
    bad_words: Sequence[str] | None = None
    """Words that must not appear in the output, by the tokens they are made of."""
    beam_search: BeamSearch | None = None
    """Then n is at most its width, and no field that is about drawing tokens may be set."""
    structured_output: StructuredOutput | None = None
    """What the output must look like. It ends where it is complete, or at max_tokens."""

    def with_options(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """A copy with these fields changed."""
        return replace(self, **options)


class SamplingOptions(TypedDict, total=False):
    """SamplingParams as keyword arguments: the same names and types."""

    n: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None
    logprobs: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    best_of: int | None
    prompt_logprobs: int | None
    echo: bool | None
    bad_words: Sequence[str] | None
    beam_search: BeamSearch | None
    structured_output: StructuredOutput | None
