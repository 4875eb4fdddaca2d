"""Names shared by logs, spans and metrics: events and phases of requests, and attributes.

Names in gen_ai.* follow OpenTelemetry's conventions for generative AI; all others begin with
"baton.".
"""

from __future__ import annotations

import enum
from typing import Final


class RequestEvent(enum.StrEnum):
    """Events of a request, named as in the handoff's state machine (see docs/architecture.md)."""

    QUEUED = "queued"
    """Waits in the gateway for workers."""
    PLACED = "placed"
    """Assigned to workers."""
    DEFERRED = "deferred"
    """The decode worker had no room; queued again."""
    OFFERED = "offered"
    """The decode worker reserved blocks and issued a ticket."""
    LOCAL_PREFILL = "local_prefill"
    """The decode worker computes the prompt itself."""
    RESERVED = "reserved"
    """A prefill worker presented the ticket."""
    RECEIVING = "receiving"
    """The first chunk of KV arrived."""
    PREFILLED = "prefilled"
    """The prefill worker reported the first token."""
    COMMITTED = "committed"
    """All KV has arrived, and the sequence runs."""
    ABORTED = "aborted"
    """The ticket was aborted."""
    PREEMPTED = "preempted"
    """Preempted for lack of memory; queued again, with its tokens so far."""
    HANDED_OFF = "handed_off"
    """Another decode worker took it over."""
    FAILED = "failed"
    """A worker failed it."""
    MOVED = "moved"
    """Another decode worker took it over, including its KV."""
    RESUMED = "resumed"
    """Placed again after a preemption or a failure."""
    CANCELLED = "cancelled"
    """The client disconnected, or the deadline passed."""
    FINISHED = "finished"
    """Its output has ended."""


class Phase(enum.StrEnum):
    """Phases of a request at the gateway. Exactly one applies at any time."""

    TOKENIZE = "tokenize"
    QUEUE = "queue"
    RESERVE = "reserve"
    PREFILL = "prefill"
    FIRST_STEP = "first_step"
    DECODE = "decode"


class SpanName(enum.StrEnum):
    """Spans below the gateway's request span, by process."""

    TOKENIZE = "tokenize"
    QUEUE = "queue"
    RESERVE = "reserve"
    AWAIT_PREFILL = "await prefill"
    STREAM = "stream"
    PREFILL_QUEUE = "prefill queue"
    PREFILL = "prefill"
    PREFILL_CHUNK = "prefill chunk"
    SEND = "send"
    TRANSFER = "transfer"
    COMMIT = "commit"
    DECODE = "decode"


OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"
ERROR_TYPE: Final = "error.type"

EVENT: Final = "baton.event"
PHASE: Final = "baton.phase"
STATE: Final = "baton.state"
REASON: Final = "baton.reason"
KV_TIER: Final = "baton.kv.tier"
TIER: Final = "baton.tier"
WORKER_TIER: Final = "baton.worker.tier"
REQUEST_ID: Final = "baton.request_id"
PREFILL_WORKER: Final = "baton.prefill_worker"
DECODE_WORKER: Final = "baton.decode_worker"
NUM_TOKENS: Final = "baton.num_tokens"
NUM_CACHED_TOKENS: Final = "baton.num_cached_tokens"
TRANSFER_BYTES: Final = "baton.transfer.bytes"
TRANSFER_EXPOSED_MS: Final = "baton.transfer.exposed_ms"

#: Value of gen_ai.provider.name.
PROVIDER: Final = "baton"
