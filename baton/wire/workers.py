"""What a worker is, and what it is at."""

from __future__ import annotations

from baton.types import BlockCounts, Tier, WorkerIdentity, WorkerInfo, WorkerLoad
from baton.v1 import worker_pb2
from baton.wire.layouts import layout_from_proto, layout_to_proto
from baton.wire.numerics import numerics_from_proto, numerics_to_proto


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
    )
