"""`baton status --blocks`: the KV block ledger of every worker, queried from the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.client import WorkerStatus
    from baton.rpc.tls import TlsFiles
    from baton.v1.worker_pb2 import ListBlocksResponse

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerBlocks:
    """KV blocks of one worker: its ledger, or why the query failed."""

    worker_id: str
    address: str
    ledger: ListBlocksResponse
    error: str = ""


def blocks_of(workers: Iterable[WorkerStatus], tls: TlsFiles | None = None) -> list[WorkerBlocks]:
    """Query each worker; failures are recorded per worker. tls: None for plain text."""
    return [_ask(worker, tls) for worker in workers]


def as_json(found: Iterable[WorkerBlocks]) -> list[dict[str, object]]:
    return [
        {
            "worker_id": worker.worker_id,
            "address": worker.address,
            "error": worker.error,
            "free_block_ids": list(worker.ledger.free_block_ids),
            "cached_block_ids": list(worker.ledger.cached_block_ids),
            "orphan_block_ids": list(worker.ledger.orphan_block_ids),
            "owners": [
                {
                    "request_id": owner.request_id,
                    "choice": owner.choice,
                    "stage": owner.stage,
                    "ticket_id": owner.ticket_id,
                    "block_ids": list(owner.block_ids),
                }
                for owner in worker.ledger.owners
            ],
        }
        for worker in found
    ]


def print_blocks(found: Iterable[WorkerBlocks]) -> None:
    """Print one line per worker and one per lease."""
    for worker in found:
        name = f"{worker.worker_id or '?'} at {worker.address}"
        if worker.error:
            typer.echo(f"{name}: {worker.error}")
            continue
        ledger = worker.ledger
        owned = {block for owner in ledger.owners for block in owner.block_ids}
        typer.echo(
            f"{name}: {len(ledger.free_block_ids)} free, {len(ledger.cached_block_ids)} cached, "
            f"{len(owned)} owned, {len(ledger.orphan_block_ids)} orphans"
        )
        for owner in ledger.owners:
            ticket = f", ticket {owner.ticket_id:016x}" if owner.ticket_id else ""
            typer.echo(
                f"  {owner.request_id} choice {owner.choice}: {len(owner.block_ids)} blocks, "
                f"{owner.stage}{ticket}"
            )


def _ask(worker: WorkerStatus, tls: TlsFiles | None) -> WorkerBlocks:
    import grpc

    from baton.rpc.channel import sync_channel
    from baton.v1 import worker_pb2, worker_pb2_grpc

    with sync_channel(worker.address, tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            ledger = stub.ListBlocks(worker_pb2.ListBlocksRequest(), timeout=_TIMEOUT_S)
            error = ""
        except grpc.RpcError as failed:
            ledger = worker_pb2.ListBlocksResponse()
            error = f"no answer from here ({failed.code().name})"
    return WorkerBlocks(worker.worker_id, worker.address, ledger, error)
