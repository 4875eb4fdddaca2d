"""Validation of sequences that arrive on a worker's port, before any state changes.

The gateway has checked the same, and more, of its clients' requests. Any other client of the port,
and a faulty gateway, gets an error, and never a wrong token or an engine fault. Unknown enum values
are rejected where messages are parsed (baton.wire).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf, isfinite
from types import MappingProxyType

from baton.errors import InvalidRequest
from baton.types import TENANT_BYTES, BeamParams, Sampling, SequenceSpec
from engine.interface import EngineSpec

#: Choices or beams above what any worker has places for, on either side of a handoff.
MAX_WIDTH = 4096

#: Valid ranges of Sampling fields. NaN fails all of them.
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = MappingProxyType(
    {
        "temperature": (lambda value: 0 <= value < inf, "0 or more, and finite"),
        "top_p": (lambda value: 0 < value <= 1, "above 0, and at most 1"),
        "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
        "repetition_penalty": (lambda value: 0 < value < inf, "above 0, and finite"),
        "presence_penalty": (isfinite, "finite"),
        "frequency_penalty": (isfinite, "finite"),
    }
)


def refusal(spec: SequenceSpec, engine: EngineSpec) -> InvalidRequest | None:
    """The error if the engine can never run the sequence; else None."""
    fault = next(_faults(spec, engine), None)
    return InvalidRequest(fault) if fault else None


def _faults(spec: SequenceSpec, engine: EngineSpec) -> Iterator[str]:
    if not spec.prompt_token_ids:
        yield "prompt: no tokens; give at least 1"
    if spec.num_tokens >= engine.max_model_len:
        yield (
            f"prompt: {spec.num_tokens} tokens leave no room for output in this worker's "
            f"{engine.max_model_len}; shorten the prompt"
        )
    largest = max(max(spec.prompt_token_ids, default=0), max(spec.output_token_ids, default=0))
    if largest >= engine.vocab_size:
        yield f"prompt.token_ids: {largest} {_not_below(engine.vocab_size)}"
    if spec.adapter and spec.adapter not in engine.adapters:
        yield f"adapter: {spec.adapter!r} is not loaded here; start the worker with --lora-modules"
    if len(spec.tenant) not in (0, TENANT_BYTES):
        yield f"tenant: {len(spec.tenant)} bytes, must be 0 or {TENANT_BYTES}"
    if not 1 <= spec.num_choices <= MAX_WIDTH:
        yield f"num_choices: {spec.num_choices}, must be 1 to {MAX_WIDTH}"
    yield from _sampling_faults(spec.sampling, engine.vocab_size)
    if spec.sampling.max_tokens <= len(spec.output_token_ids):
        yield (
            f"sampling.max_tokens: {spec.sampling.max_tokens}, must be above the "
            f"{len(spec.output_token_ids)} tokens of output that there are"
        )


def _sampling_faults(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    for name, (holds, rule) in _RANGES.items():
        value = getattr(sampling, name)
        if not holds(value):
            yield f"sampling.{name}: {value:g}, must be {rule}"
    for name in ("logprobs", "prompt_logprobs"):
        if not -1 <= getattr(sampling, name) <= vocab_size:
            yield f"sampling.{name}: {getattr(sampling, name)}, must be -1 to {vocab_size}"
    if not all(map(isfinite, sampling.logit_bias.values())):
        yield "sampling.logit_bias: must be finite"
    if not all(sampling.bad_words):
        yield "sampling.bad_words: one has no token; leave it out"
    ids = {
        "logit_bias": sampling.logit_bias,
        "stop_token_ids": sampling.stop_token_ids,
        "bad_words": [max(word, default=0) for word in sampling.bad_words],
        "allowed_token_ids": sampling.allowed_token_ids,
        "logprob_token_ids": sampling.logprob_token_ids,
    }
    for name, token_ids in ids.items():
        if max(token_ids, default=0) >= vocab_size:
            yield f"sampling.{name}: {max(token_ids)} {_not_below(vocab_size)}"
    if sampling.beam is not None:
        yield from _beam_faults(sampling.beam)


def _beam_faults(beam: BeamParams) -> Iterator[str]:
    if not 1 <= beam.width <= MAX_WIDTH:
        yield f"sampling.beam.width: {beam.width}, must be 1 to {MAX_WIDTH}"
    if not 1 <= beam.num_returned <= beam.width:
        yield f"sampling.beam.num_returned: {beam.num_returned}, must be 1 to {beam.width}"
    if not isfinite(beam.length_penalty):
        yield "sampling.beam.length_penalty: must be finite"


def _not_below(vocab_size: int) -> str:
    return f"is not below the vocabulary's size, {vocab_size}"
