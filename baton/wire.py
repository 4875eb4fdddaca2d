"""Between the immutable values of baton.types and baton.events and the protobuf messages of
baton.v1: how KV lies and how a worker rounds, what a worker is and what it is at, sequences and
their tokens, what a step did to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import IntEnum
from math import isnan, nan
from types import MappingProxyType
from typing import Any, TypeVar

from baton.errors import InvalidRequest
from baton.events import (
    AddressedEvent,
    Committed,
    Deferred,
    Failed,
    HandedOff,
    HandOffFailed,
    LocalPrefill,
    Offered,
    Paused,
    Preempted,
    Prefilled,
    SequenceEvent,
    Tokens,
)
from baton.types import (
    BeamParams,
    BlockCounts,
    EarlyStopping,
    FinishReason,
    KvLayout,
    NumericsClass,
    Sample,
    Sampling,
    SequenceSpec,
    Tier,
    TokenLogprobs,
    WorkerIdentity,
    WorkerInfo,
    WorkerLoad,
)
from baton.v1 import (
    kv_pb2,
    numerics_pb2,
    sampling_pb2,
    sequence_pb2,
    sequence_service_pb2,
    worker_pb2,
)

#: Stands for "no score" where other entries of a step have one.
_NO_SCORE = nan

#: Fields of Sampling that are not numbers or bytes of the same name in TokenSampling.
_COMPOSED = frozenset({"logit_bias", "stop_token_ids", "bad_words", "beam"})
_PLAIN = tuple(field.name for field in fields(Sampling) if field.name not in _COMPOSED)


EnumT = TypeVar("EnumT", bound=IntEnum)


def known(kind: type[EnumT], number: int, field: str) -> EnumT:
    """The member of an enum that a message's field says. Raises InvalidRequest if this version
    knows none."""
    try:
        return kind(number)
    except ValueError:
        numbers = ", ".join(f"{member.value} ({member.name})" for member in kind)
        raise InvalidRequest(
            f"{field}: {number} is unknown here; must be one of {numbers}"
        ) from None


def layout_to_proto(layout: KvLayout) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(
        fingerprint=layout.fingerprint,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_size=layout.block_size,
    )


def layout_from_proto(message: kv_pb2.KvLayout) -> KvLayout:
    return KvLayout(
        fingerprint=message.fingerprint,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        block_size=message.block_size,
    )


def numerics_to_proto(numerics: NumericsClass) -> numerics_pb2.NumericsClass:
    return numerics_pb2.NumericsClass(
        device=numerics.device,
        level=numerics.level,
        dtype=numerics.dtype,
        kernels=numerics.kernels,
    )


def numerics_from_proto(message: numerics_pb2.NumericsClass) -> NumericsClass:
    return NumericsClass(message.device, message.level, message.dtype, message.kernels)


def info_to_proto(info: WorkerInfo) -> worker_pb2.GetWorkerInfoResponse:
    return worker_pb2.GetWorkerInfoResponse(
        worker_id=info.identity.worker_id,
        generation=info.identity.generation,
        tier=worker_pb2.Tier.ValueType(info.tier),
        model=info.model,
        layout=layout_to_proto(info.layout),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_local_prefill_tokens=info.max_local_prefill_tokens,
        numerics=numerics_to_proto(info.numerics),
        min_protocol_version=info.min_protocol_version,
        max_protocol_version=info.max_protocol_version,
        software_version=info.software_version,
        metrics_port=info.metrics_port,
    )


def info_from_proto(message: worker_pb2.GetWorkerInfoResponse) -> WorkerInfo:
    """Raises ValueError if the tier is none that this version knows."""
    return WorkerInfo(
        identity=WorkerIdentity(message.worker_id, message.generation),
        tier=Tier(message.tier),
        model=message.model,
        layout=layout_from_proto(message.layout),
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_local_prefill_tokens=message.max_local_prefill_tokens,
        numerics=numerics_from_proto(message.numerics),
        min_protocol_version=message.min_protocol_version,
        max_protocol_version=message.max_protocol_version,
        software_version=message.software_version,
        metrics_port=message.metrics_port,
    )


def load_to_proto(
    load: WorkerLoad, heartbeat_age_ms: int = 0, max_heartbeat_age_ms: int = 0
) -> worker_pb2.WatchLoadResponse:
    draining = worker_pb2.WORKER_STATE_DRAINING
    return worker_pb2.WatchLoadResponse(
        state=draining if load.is_draining else worker_pb2.WORKER_STATE_READY,
        num_steps=load.num_steps,
        heartbeat_age_ms=heartbeat_age_ms,
        max_heartbeat_age_ms=max_heartbeat_age_ms,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_pending_tokens=load.num_pending_tokens,
        num_free_blocks=load.blocks.free,
        num_cached_blocks=load.blocks.cached,
        num_leased_blocks=load.blocks.leased,
        num_open_tickets=load.num_open_tickets,
        num_orphan_blocks=load.num_orphan_blocks,
        num_orphan_sequences=load.num_orphan_sequences,
        num_swaps=load.num_swaps,
        local_prefill_threshold=load.local_prefill_threshold,
        role=worker_pb2.Tier.ValueType(load.role or 0),
        prefill_tokens_per_s=load.prefill_tokens_per_s,
    )


def load_from_proto(message: worker_pb2.WatchLoadResponse) -> WorkerLoad:
    return WorkerLoad(
        num_steps=message.num_steps,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_pending_tokens=message.num_pending_tokens,
        blocks=BlockCounts(
            message.num_free_blocks, message.num_cached_blocks, message.num_leased_blocks
        ),
        num_open_tickets=message.num_open_tickets,
        num_orphan_blocks=message.num_orphan_blocks,
        num_orphan_sequences=message.num_orphan_sequences,
        num_swaps=message.num_swaps,
        is_draining=message.state == worker_pb2.WORKER_STATE_DRAINING,
        local_prefill_threshold=message.local_prefill_threshold,
        role=Tier(message.role) if message.role else None,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
    )


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
            early_stopping=known(EarlyStopping, message.beam.early_stopping, "beam.early_stopping"),
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


def step_to_proto(events: Iterable[AddressedEvent]) -> sequence_service_pb2.ServeResponse:
    """One message for all that a step did to one gateway's sequences. Changes of state precede the
    step's tokens."""
    response = sequence_service_pb2.ServeResponse()
    handles: list[int] = []
    entries: list[Tokens] = []
    for handle, event in events:
        if isinstance(event, Tokens):
            handles.append(handle)
            entries.append(event)
        else:
            response.events.append(_event_to_proto(handle, event))
    if entries:
        columns = response.tokens
        # A whole column at a time: a call per entry costs more than half of what the entry does.
        columns.handles.extend(handles)
        columns.token_indices.extend([event.token_index for event in entries])
        columns.counts.extend([len(event.samples) for event in entries])
        columns.token_ids.extend([s.token_id for event in entries for s in event.samples])
        columns.finish_reasons.extend(
            [sampling_pb2.FinishReason.ValueType(event.finish) for event in entries]
        )
        for entry, event in enumerate(entries):
            if event.samples and event.samples[0].logprobs:
                positions = [logprobs_to_proto(s.logprobs) for s in event.samples if s.logprobs]
                columns.logprobs.add(entry=entry, positions=positions)
        if any(event.num_draft_tokens for event in entries):
            columns.num_draft_tokens.extend([event.num_draft_tokens for event in entries])
            columns.num_accepted_tokens.extend([event.num_accepted_tokens for event in entries])
        if any(event.score is not None for event in entries):
            columns.scores.extend([_NO_SCORE if e.score is None else e.score for e in entries])
    return response


def step_from_proto(response: sequence_service_pb2.ServeResponse) -> Iterator[AddressedEvent]:
    """The inverse of step_to_proto."""
    for message in response.events:
        yield message.handle, _event_from_proto(message)
    if response.HasField("tokens"):
        yield from _columns_from_proto(response.tokens)


def _columns_from_proto(columns: sequence_service_pb2.StepTokens) -> Iterator[AddressedEvent]:
    logprobs = {entry.entry: entry.positions for entry in columns.logprobs}
    nothing = [0] * len(columns.handles)
    scores = [None if isnan(score) else score for score in columns.scores] or [None] * len(nothing)
    all_token_ids = list(columns.token_ids)
    end = 0
    for entry, (handle, token_index, count, finish, num_drafts, num_accepted, score) in enumerate(
        zip(
            columns.handles,
            columns.token_indices,
            columns.counts,
            columns.finish_reasons,
            columns.num_draft_tokens or nothing,
            columns.num_accepted_tokens or nothing,
            scores,
            strict=True,
        )
    ):
        start, end = end, end + count
        token_ids = all_token_ids[start:end]
        samples = (
            tuple(
                Sample(token_id, logprobs_from_proto(position))
                for token_id, position in zip(token_ids, logprobs[entry], strict=True)
            )
            if entry in logprobs
            else tuple(map(Sample, token_ids))
        )
        # Nearly all go on, and to look up an enum's member costs as much as a token.
        reason = FinishReason(finish) if finish else FinishReason.NONE
        yield handle, Tokens(token_index, samples, reason, num_drafts, num_accepted, score)


def _event_to_proto(handle: int, event: SequenceEvent) -> sequence_service_pb2.SequenceEvent:
    message = sequence_service_pb2.SequenceEvent(handle=handle)
    match event:
        case Offered(ticket, num_cached_tokens, _):
            message.offered.ticket = ticket
            message.offered.num_cached_tokens = num_cached_tokens
        case LocalPrefill(num_cached_tokens):
            message.local_prefill.num_cached_tokens = num_cached_tokens
            message.local_prefill.SetInParent()
        case Deferred(reason):
            message.deferred.reason = reason
            message.deferred.SetInParent()
        case Committed(transfer_exposed_ms, transfer_bytes):
            message.committed.transfer_exposed_ms = transfer_exposed_ms
            message.committed.transfer_bytes = transfer_bytes
            message.committed.SetInParent()
        case Preempted():
            message.preempted.SetInParent()
        case Prefilled(num_cached_tokens, num_fetched_tokens, queue_ms, compute_ms, positions, _):
            message.prefilled.num_cached_tokens = num_cached_tokens
            message.prefilled.num_fetched_tokens = num_fetched_tokens
            message.prefilled.queue_ms = queue_ms
            message.prefilled.compute_ms = compute_ms
            message.prefilled.prompt_logprobs.extend(map(logprobs_to_proto, positions))
            message.prefilled.SetInParent()
        case Paused():
            message.paused.SetInParent()
        case HandedOff():
            message.handed_off.SetInParent()
        case HandOffFailed(reason, text):
            message.hand_off_failed.reason = reason
            message.hand_off_failed.message = text
            message.hand_off_failed.SetInParent()
        case Failed(reason, text, is_retriable):
            message.failed.reason = reason
            message.failed.message = text
            message.failed.retriable = is_retriable
        case Tokens():
            raise TypeError("tokens travel in columns")
    return message


def _event_from_proto(message: sequence_service_pb2.SequenceEvent) -> SequenceEvent:
    event: SequenceEvent
    name = message.WhichOneof("event")
    match name:
        case "offered":
            event = Offered(message.offered.ticket, message.offered.num_cached_tokens)
        case "local_prefill":
            event = LocalPrefill(message.local_prefill.num_cached_tokens)
        case "deferred":
            event = Deferred(message.deferred.reason)
        case "committed":
            committed = message.committed
            event = Committed(committed.transfer_exposed_ms, committed.transfer_bytes)
        case "preempted":
            event = Preempted()
        case "prefilled":
            prefilled = message.prefilled
            event = Prefilled(
                prefilled.num_cached_tokens,
                prefilled.num_fetched_tokens,
                prefilled.queue_ms,
                prefilled.compute_ms,
                tuple(map(logprobs_from_proto, prefilled.prompt_logprobs)),
            )
        case "paused":
            event = Paused()
        case "handed_off":
            event = HandedOff()
        case "hand_off_failed":
            event = HandOffFailed(message.hand_off_failed.reason, message.hand_off_failed.message)
        case "failed":
            failed = message.failed
            event = Failed(failed.reason, failed.message, failed.retriable)
        case _:
            raise ValueError(f"sequence event {name!r} is not known to this version")
    return event
