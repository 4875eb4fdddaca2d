"""Sampling and stopping parameters, as callers of the SDK write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack


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
