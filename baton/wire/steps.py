"""What a step did to sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isnan, nan
from types import MappingProxyType

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
from baton.types import FinishReason, Sample
from baton.v1 import sampling_pb2, sequence_service_pb2
from baton.wire.sequences import logprobs_from_proto, logprobs_to_proto

#: Stands for "no score" where other entries of a step have one.
_NO_SCORE = nan


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
        _fill_columns(response.tokens, handles, entries)
    return response


def _fill_columns(
    columns: sequence_service_pb2.StepTokens, handles: Sequence[int], entries: Sequence[Tokens]
) -> None:
    """A whole column at a time: what a call costs would be more than half of what an entry does."""
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
        case Offered(ticket, num_cached_tokens):
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
    name = message.WhichOneof("event")
    parse = _EVENT_PARSERS.get(name or "")
    if parse is None:
        raise ValueError(f"sequence event {name!r} is not known to this version")
    return parse(message)


_EVENT_PARSERS: Mapping[str, Callable[[sequence_service_pb2.SequenceEvent], SequenceEvent]] = (
    MappingProxyType(
        {
            "offered": lambda m: Offered(m.offered.ticket, m.offered.num_cached_tokens),
            "local_prefill": lambda m: LocalPrefill(m.local_prefill.num_cached_tokens),
            "deferred": lambda m: Deferred(m.deferred.reason),
            "committed": lambda m: Committed(
                m.committed.transfer_exposed_ms, m.committed.transfer_bytes
            ),
            "preempted": lambda _: Preempted(),
            "prefilled": lambda m: Prefilled(
                m.prefilled.num_cached_tokens,
                m.prefilled.num_fetched_tokens,
                m.prefilled.queue_ms,
                m.prefilled.compute_ms,
                tuple(map(logprobs_from_proto, m.prefilled.prompt_logprobs)),
            ),
            "paused": lambda _: Paused(),
            "handed_off": lambda _: HandedOff(),
            "hand_off_failed": lambda m: HandOffFailed(
                m.hand_off_failed.reason, m.hand_off_failed.message
            ),
            "failed": lambda m: Failed(m.failed.reason, m.failed.message, m.failed.retriable),
        }
    )
)
