"""Sequences, how their tokens are chosen, and the tokens."""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType
from typing import Any

from baton.types import BeamParams, EarlyStopping, Sample, Sampling, SequenceSpec, TokenLogprobs
from baton.v1 import sampling_pb2, sequence_pb2

#: Fields of Sampling that are not numbers or bytes of the same name in TokenSampling.
_COMPOSED = frozenset({"logit_bias", "stop_token_ids", "bad_words", "beam"})
_PLAIN = tuple(field.name for field in fields(Sampling) if field.name not in _COMPOSED)


def sampling_to_proto(sampling: Sampling) -> sampling_pb2.TokenSampling:
    plain: dict[str, Any] = {name: getattr(sampling, name) for name in _PLAIN}
    message = sampling_pb2.TokenSampling(
        **plain,
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=sorted(sampling.stop_token_ids),
        bad_words=[sampling_pb2.TokenSequence(ids=word) for word in sampling.bad_words],
    )
    if beam := sampling.beam:
        message.beam.width = beam.width
        message.beam.length_penalty = beam.length_penalty
        message.beam.early_stopping = sampling_pb2.EarlyStopping.ValueType(beam.early_stopping)
        message.beam.num_returned = beam.num_returned
    return message


def sampling_from_proto(message: sampling_pb2.TokenSampling) -> Sampling:
    plain: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
    beam = None
    if message.HasField("beam"):
        beam = BeamParams(
            width=message.beam.width,
            length_penalty=message.beam.length_penalty,
            early_stopping=EarlyStopping(message.beam.early_stopping),
            num_returned=message.beam.num_returned,
        )
    return Sampling(
        **plain,
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        stop_token_ids=frozenset(message.stop_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        beam=beam,
    )


def sequence_to_proto(spec: SequenceSpec) -> sequence_pb2.SequenceState:
    return sequence_pb2.SequenceState(
        request_id=spec.request_id,
        choice=spec.choice,
        tenant=spec.tenant,
        prompt_token_ids=spec.prompt_token_ids,
        output_token_ids=spec.output_token_ids,
        sampling=sampling_to_proto(spec.sampling),
        priority=spec.priority,
        arrival_ns=spec.arrival_ns,
        traceparent=spec.traceparent,
        tracestate=spec.tracestate,
        num_choices=spec.num_choices,
    )


def sequence_from_proto(message: sequence_pb2.SequenceState) -> SequenceSpec:
    return SequenceSpec(
        request_id=message.request_id,
        choice=message.choice,
        tenant=message.tenant,
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        sampling=sampling_from_proto(message.sampling),
        priority=message.priority,
        arrival_ns=message.arrival_ns,
        traceparent=message.traceparent,
        tracestate=message.tracestate,
        num_choices=message.num_choices or 1,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> sampling_pb2.PositionLogprobs:
    return sampling_pb2.PositionLogprobs(
        chosen=sampling_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[
            sampling_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in logprobs.top
        ],
    )


def logprobs_from_proto(message: sampling_pb2.PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.chosen.token_id,
        logprob=message.chosen.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
    )


def sample_to_proto(sample: Sample) -> sampling_pb2.SampledToken:
    logprobs = logprobs_to_proto(sample.logprobs) if sample.logprobs else None
    return sampling_pb2.SampledToken(token_id=sample.token_id, logprobs=logprobs)


def sample_from_proto(message: sampling_pb2.SampledToken) -> Sample:
    logprobs = logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None
    return Sample(message.token_id, logprobs)
