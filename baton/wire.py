"""Conversions between values of baton.types and baton.events and messages of baton.v1: layouts,
numerics classes, workers and their loads, sequences, tokens, commands, and events of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from enum import IntEnum
from itertools import repeat
from math import isnan, nan
from types import MappingProxyType
from typing import Any, TypeVar

from baton.commands import Abort, HandOff, Pause, Resume, SequenceCommand
from baton.errors import InvalidRequest
from baton.events import (
    AddressedEvent,
    Committed,
    Deferred,
    Failed,
    HandedOff,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Paused,
    Preempted,
    Prefilled,
    SequenceEvent,
    Tokens,
)
from baton.types import (
    KEY_VALUE,
    BeamParams,
    BlockCounts,
    EarlyStopping,
    FinishReason,
    KvLayout,
    NumericsClass,
    Sample,
    Sampling,
    SequenceSpec,
    Slo,
    StepCosts,
    Tier,
    TierLoad,
    TokenLogprobs,
    WorkerIdentity,
    WorkerInfo,
    WorkerLoad,
)
from baton.v1 import (
    kv_pb2,
    kv_tiers_pb2,
    numerics_pb2,
    sampling_pb2,
    sequence_pb2,
    sequence_service_pb2,
    worker_pb2,
)

#: "No score", in a step where other entries have one.
_NO_SCORE = nan


def _plain(kind: type[Any], *composed: str) -> tuple[str, ...]:
    """Names of scalar fields, which have the same name in the message."""
    return tuple(field.name for field in fields(kind) if field.name not in composed)


_LAYOUT = _plain(KvLayout, "parts", "windowed_layers")
_NUMERICS = _plain(NumericsClass)
_INFO = _plain(WorkerInfo, "identity", "tier", "layout", "numerics", "adapters")
_LOAD = _plain(WorkerLoad, "blocks", "window_slots", "is_draining", "role", "kv_tiers", "costs")
_COSTS = _plain(StepCosts)
_TIER_LOAD = _plain(TierLoad)
_TOKEN_LISTS = ("allowed_token_ids", "logprob_token_ids")
_SAMPLING = _plain(Sampling, "logit_bias", "stop_token_ids", "bad_words", "beam", *_TOKEN_LISTS)
_SEQUENCE = _plain(
    SequenceSpec, "slo", "prompt_token_ids", "output_token_ids", "sampling", "num_choices"
)


def _values(source: object, names: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(names, map(getattr, repeat(source), names), strict=True))


EnumT = TypeVar("EnumT", bound=IntEnum)


def known(kind: type[EnumT], number: int, field: str) -> EnumT:
    """The enum member of a message's number. Raises InvalidRequest if this version has none."""
    try:
        return kind(number)
    except ValueError:
        numbers = ", ".join(f"{member.value} ({member.name})" for member in kind)
        raise InvalidRequest(
            f"{field}: {number} is unknown here; must be one of {numbers}"
        ) from None


def layout_to_proto(layout: KvLayout) -> kv_pb2.KvLayout:
    # Plain keys and values omit `parts`: byte-compatible with 0.1.0.
    parts = () if layout.parts == KEY_VALUE else layout.parts
    return kv_pb2.KvLayout(
        **_values(layout, _LAYOUT), parts=parts, windowed_layers=layout.windowed_layers
    )


def layout_from_proto(message: kv_pb2.KvLayout) -> KvLayout:
    return KvLayout(
        **_values(message, _LAYOUT),
        parts=tuple(message.parts) or KEY_VALUE,
        windowed_layers=tuple(message.windowed_layers),
    )


def numerics_to_proto(numerics: NumericsClass) -> numerics_pb2.NumericsClass:
    return numerics_pb2.NumericsClass(**_values(numerics, _NUMERICS))


def numerics_from_proto(message: numerics_pb2.NumericsClass) -> NumericsClass:
    return NumericsClass(**_values(message, _NUMERICS))


def info_to_proto(info: WorkerInfo) -> worker_pb2.GetWorkerInfoResponse:
    return worker_pb2.GetWorkerInfoResponse(
        **_values(info, _INFO),
        worker_id=info.identity.worker_id,
        generation=info.identity.generation,
        tier=worker_pb2.Tier.ValueType(info.tier),
        layout=layout_to_proto(info.layout),
        numerics=numerics_to_proto(info.numerics),
        adapters=info.adapters,
    )


def info_from_proto(message: worker_pb2.GetWorkerInfoResponse) -> WorkerInfo:
    """Raises ValueError for a tier unknown to this version."""
    return WorkerInfo(
        **_values(message, _INFO),
        identity=WorkerIdentity(message.worker_id, message.generation),
        tier=Tier(message.tier),
        layout=layout_from_proto(message.layout),
        numerics=numerics_from_proto(message.numerics),
        adapters=tuple(message.adapters),
    )


def load_to_proto(
    load: WorkerLoad, heartbeat_age_ms: int = 0, max_heartbeat_age_ms: int = 0
) -> worker_pb2.WatchLoadResponse:
    draining = worker_pb2.WORKER_STATE_DRAINING
    return worker_pb2.WatchLoadResponse(
        **_values(load, _LOAD),
        state=draining if load.is_draining else worker_pb2.WORKER_STATE_READY,
        heartbeat_age_ms=heartbeat_age_ms,
        max_heartbeat_age_ms=max_heartbeat_age_ms,
        num_free_blocks=load.blocks.free,
        num_cached_blocks=load.blocks.cached,
        num_leased_blocks=load.blocks.leased,
        num_free_window_slots=load.window_slots.free,
        num_cached_window_slots=load.window_slots.cached,
        num_leased_window_slots=load.window_slots.leased,
        role=worker_pb2.Tier.ValueType(load.role or 0),
        kv_tiers=map(tier_load_to_proto, load.kv_tiers),
        costs=worker_pb2.StepCosts(**_values(load.costs, _COSTS)),
    )


def load_from_proto(message: worker_pb2.WatchLoadResponse) -> WorkerLoad:
    return WorkerLoad(
        **_values(message, _LOAD),
        blocks=BlockCounts(
            message.num_free_blocks, message.num_cached_blocks, message.num_leased_blocks
        ),
        window_slots=BlockCounts(
            message.num_free_window_slots,
            message.num_cached_window_slots,
            message.num_leased_window_slots,
        ),
        is_draining=message.state == worker_pb2.WORKER_STATE_DRAINING,
        role=Tier(message.role) if message.role else None,
        kv_tiers=tuple(map(tier_load_from_proto, message.kv_tiers)),
        costs=StepCosts(**_values(message.costs, _COSTS)),
    )


def tier_load_to_proto(load: TierLoad) -> kv_tiers_pb2.KvTierLoad:
    return kv_tiers_pb2.KvTierLoad(**_values(load, _TIER_LOAD))


def tier_load_from_proto(message: kv_tiers_pb2.KvTierLoad) -> TierLoad:
    return TierLoad(**_values(message, _TIER_LOAD))


def sampling_to_proto(sampling: Sampling) -> sampling_pb2.TokenSampling:
    message = sampling_pb2.TokenSampling(
        **_values(sampling, (*_SAMPLING, *_TOKEN_LISTS)),
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
    beam = None
    if message.HasField("beam"):
        beam = BeamParams(
            width=message.beam.width,
            length_penalty=message.beam.length_penalty,
            early_stopping=known(EarlyStopping, message.beam.early_stopping, "beam.early_stopping"),
            num_returned=message.beam.num_returned,
        )
    return Sampling(
        **_values(message, _SAMPLING),
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        stop_token_ids=frozenset(message.stop_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        beam=beam,
        allowed_token_ids=tuple(message.allowed_token_ids),
        logprob_token_ids=tuple(message.logprob_token_ids),
    )


def sequence_to_proto(spec: SequenceSpec) -> sequence_pb2.SequenceState:
    message = sequence_pb2.SequenceState()
    write_sequence(spec, message)
    message.prompt_token_ids.extend(spec.prompt_token_ids)
    message.output_token_ids.extend(spec.output_token_ids)
    return message


def write_sequence(spec: SequenceSpec, message: sequence_pb2.SequenceState) -> None:
    """Write everything but the tokens into an empty message. The caller writes tokens in place, in
    pieces: there may be a million."""
    for name in _SEQUENCE:
        setattr(message, name, getattr(spec, name))
    message.sampling.MergeFrom(sampling_to_proto(spec.sampling))
    message.num_choices = spec.num_choices
    if spec.slo:
        message.slo_ttft_s, message.slo_tpot_s = spec.slo.ttft_s or 0.0, spec.slo.tpot_s or 0.0


def sequence_from_proto(message: sequence_pb2.SequenceState) -> SequenceSpec:
    return SequenceSpec(
        **_values(message, _SEQUENCE),
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        sampling=sampling_from_proto(message.sampling),
        num_choices=message.num_choices or 1,
        slo=_slo_from(message),
    )


def _slo_from(message: sequence_pb2.SequenceState) -> Slo | None:
    ttft_s, tpot_s = message.slo_ttft_s, message.slo_tpot_s
    return Slo(ttft_s or None, tpot_s or None) if ttft_s or tpot_s else None


def logprobs_to_proto(logprobs: TokenLogprobs) -> sampling_pb2.PositionLogprobs:
    return sampling_pb2.PositionLogprobs(
        chosen=sampling_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[
            sampling_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in logprobs.top
        ],
        rank=logprobs.rank,
    )


def logprobs_from_proto(message: sampling_pb2.PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.chosen.token_id,
        logprob=message.chosen.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
        rank=message.rank,
    )


def sample_to_proto(sample: Sample) -> sampling_pb2.SampledToken:
    logprobs = logprobs_to_proto(sample.logprobs) if sample.logprobs else None
    return sampling_pb2.SampledToken(token_id=sample.token_id, logprobs=logprobs)


def sample_from_proto(message: sampling_pb2.SampledToken) -> Sample:
    logprobs = logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None
    return Sample(message.token_id, logprobs)


#: By command: its name in ServeRequest, and its fields.
_COMMANDS: Mapping[type[SequenceCommand], tuple[str, tuple[str, ...]]] = {
    Abort: ("abort", ()),
    Pause: ("pause", ()),
    HandOff: ("hand_off", _plain(HandOff)),
    Resume: ("resume", ()),
}
_COMMAND_KINDS = {name: (kind, names) for kind, (name, names) in _COMMANDS.items()}


def command_to_proto(handle: int, command: SequenceCommand) -> sequence_service_pb2.ServeRequest:
    name, names = _COMMANDS[type(command)]
    message: dict[str, Any] = {name: {"handle": handle, **_values(command, names)}}
    return sequence_service_pb2.ServeRequest(**message)


def command_from_proto(
    message: sequence_service_pb2.ServeRequest,
) -> tuple[int, SequenceCommand] | None:
    """The inverse of command_to_proto; None for an unknown command, or one that opens a
    sequence."""
    name = message.WhichOneof("command")
    if name not in _COMMAND_KINDS:
        return None
    kind, names = _COMMAND_KINDS[name]
    command = getattr(message, name)
    return command.handle, kind(**_values(command, names))


def step_to_proto(events: Iterable[AddressedEvent]) -> sequence_service_pb2.ServeResponse:
    """One message for a step's events of one gateway's sequences: changes of state, then
    tokens."""
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
        # Whole columns: a call per entry would take more than half of the entry's time.
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
    if not response.HasField("tokens"):
        return
    columns = response.tokens
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
        # Rarely set, and looking up an enum member takes as long as a token.
        reason = FinishReason(finish) if finish else FinishReason.NONE
        yield handle, Tokens(token_index, samples, reason, num_drafts, num_accepted, score)


#: By event: its name in SequenceEvent, and its scalar fields.
_CHANGES: Mapping[type, tuple[str, tuple[str, ...]]] = {
    Offered: ("offered", _plain(Offered, "ticket_id")),
    LocalPrefill: ("local_prefill", _plain(LocalPrefill)),
    Deferred: ("deferred", _plain(Deferred)),
    Committed: ("committed", _plain(Committed)),
    Preempted: ("preempted", ()),
    Prefilled: ("prefilled", _plain(Prefilled, "prompt_logprobs", "chunks")),
    Paused: ("paused", ()),
    HandedOff: ("handed_off", ()),
    NotHandedOff: ("hand_off_failed", _plain(NotHandedOff)),
    Failed: ("failed", _plain(Failed, "is_retriable")),
}
_KINDS = {name: (kind, names) for kind, (name, names) in _CHANGES.items()}


def _event_to_proto(handle: int, event: SequenceEvent) -> sequence_service_pb2.SequenceEvent:
    name, names = _CHANGES[type(event)]
    message = sequence_service_pb2.SequenceEvent(handle=handle)
    change = getattr(message, name)
    change.SetInParent()
    for field, value in _values(event, names).items():
        setattr(change, field, value)
    if isinstance(event, Prefilled):
        change.prompt_logprobs.extend(map(logprobs_to_proto, event.prompt_logprobs))
    elif isinstance(event, Failed):
        change.retriable = event.is_retriable
    return message


def _event_from_proto(message: sequence_service_pb2.SequenceEvent) -> SequenceEvent:
    name = message.WhichOneof("event")
    if name not in _KINDS:
        raise ValueError(f"sequence event {name!r} is not known to this version")
    kind, names = _KINDS[name]
    change = getattr(message, name)
    values = _values(change, names)
    if kind is Prefilled:
        values["prompt_logprobs"] = tuple(map(logprobs_from_proto, change.prompt_logprobs))
    elif kind is Failed:
        values["is_retriable"] = change.retriable
    event: SequenceEvent = kind(**values)
    return event
