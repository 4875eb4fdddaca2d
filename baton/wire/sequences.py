"""Sequences, how their tokens are chosen, and the tokens."""

from __future__ import annotations

from types import MappingProxyType

from baton.types import BeamParams, EarlyStopping, Sample, Sampling, SequenceSpec, TokenLogprobs
from baton.v1 import sampling_pb2, sequence_pb2


def sampling_to_proto(sampling: Sampling) -> sampling_pb2.TokenSampling:
    return sampling_pb2.TokenSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        bad_words=[sampling_pb2.TokenSequence(ids=word) for word in sampling.bad_words],
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=sampling.grammar,
        beam=_beam_to_proto(sampling.beam) if sampling.beam else None,
    )


def _beam_to_proto(beam: BeamParams) -> sampling_pb2.BeamParams:
    return sampling_pb2.BeamParams(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=sampling_pb2.EarlyStopping.ValueType(beam.early_stopping),
        num_returned=beam.num_returned,
    )


def _beam_from_proto(message: sampling_pb2.BeamParams) -> BeamParams:
    return BeamParams(
        width=message.width,
        length_penalty=message.length_penalty,
        early_stopping=EarlyStopping(message.early_stopping),
        num_returned=message.num_returned,
    )


def sampling_from_proto(message: sampling_pb2.TokenSampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        seed=message.seed,
        logprobs=message.logprobs,
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        prompt_logprobs=message.prompt_logprobs,
        grammar=message.grammar,
        beam=_beam_from_proto(message.beam) if message.HasField("beam") else None,
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
