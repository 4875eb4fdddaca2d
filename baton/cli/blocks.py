"""`baton status --blocks`: the KV block ledger of every worker, queried from the workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.client import WorkerStatus
    from baton.rpc.tls import TlsFiles
    from baton.v1.worker_pb2 import BlockOwner, ListBlocksResponse

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Owner:
    """A lease of blocks."""

    request_id: str
    choice: int
    stage: str
    ticket_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerBlocks:
    """KV blocks of one worker; `error` is set if the query failed."""

    worker_id: str
    address: str
    error: str = ""
    free_block_ids: tuple[int, ...] = ()
    cached_block_ids: tuple[int, ...] = ()
    orphan_block_ids: tuple[int, ...] = ()
    owners: tuple[Owner, ...] = ()


def blocks_of(workers: Iterable[WorkerStatus], tls: TlsFiles | None = None) -> list[WorkerBlocks]:
    """Query each worker; failures are recorded per worker. tls: None for plain text."""
    return [_ask(worker, tls) for worker in workers]


def as_json(found: Iterable[WorkerBlocks]) -> list[dict[str, object]]:
    return [asdict(worker) for worker in found]


def print_blocks(found: Iterable[WorkerBlocks]) -> None:
    """Print one line per worker and one per lease."""
    for worker in found:
        name = f"{worker.worker_id or '?'} at {worker.address}"
        if worker.error:
            typer.echo(f"{name}: {worker.error}")
            continue
        owned = {block for owner in worker.owners for block in owner.block_ids}
        typer.echo(
            f"{name}: {len(worker.free_block_ids)} free, {len(worker.cached_block_ids)} cached, "
            f"{len(owned)} owned, {len(worker.orphan_block_ids)} orphans"
        )
        for owner in worker.owners:
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
        except grpc.RpcError as error:
            text = f"no answer from here ({error.code().name})"
            return WorkerBlocks(worker.worker_id, worker.address, text)
    return _ledger_of(worker, ledger)


def _ledger_of(worker: WorkerStatus, ledger: ListBlocksResponse) -> WorkerBlocks:
    return WorkerBlocks(
        worker.worker_id,
        worker.address,
        free_block_ids=tuple(ledger.free_block_ids),
        cached_block_ids=tuple(ledger.cached_block_ids),
        orphan_block_ids=tuple(ledger.orphan_block_ids),
        owners=tuple(map(_owner_of, ledger.owners)),
    )


def _owner_of(owner: BlockOwner) -> Owner:
    return Owner(
        owner.request_id, owner.choice, owner.stage, owner.ticket_id, tuple(owner.block_ids)
    )
