"""`baton status --blocks` and the call behind it, against live workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from typer.testing import CliRunner

from baton.cli.blocks import WorkerBlocks, as_json, blocks_of, print_blocks
from baton.client import WorkerStatus
from baton.rpc.channel import aio_channel
from baton.types import KvSource, Sampling, SequenceSpec
from baton.v1 import sequence_service_pb2, sequence_service_pb2_grpc, worker_pb2
from baton.wire import sequence_to_proto
from tests.support.live_tiers import decode_worker


def status_of(address: str) -> WorkerStatus:
    return WorkerStatus(
        worker_id="d",
        address=address,
        tier="decode",
        state="ready",
        reason="",
        num_running=0,
        num_waiting=0,
        num_free_blocks=0,
        num_cached_blocks=0,
        num_leased_blocks=0,
        num_blocks=0,
        block_size=4,
        num_in_flight=0,
    )


async def test_a_live_worker_lists_its_blocks() -> None:
    spec = SequenceSpec("waiting-one", tuple(range(40)), Sampling())
    async with (
        decode_worker(max_local_prefill_tokens=0) as address,
        aio_channel(address) as channel,
    ):
        call: Any = sequence_service_pb2_grpc.SequenceServiceStub(channel).Serve()
        await call.write(
            sequence_service_pb2.ServeRequest(
                open=sequence_service_pb2.OpenSequence(
                    handle=1,
                    sequence=sequence_to_proto(spec),
                    source=sequence_service_pb2.KvSource.ValueType(KvSource.PREFILL),
                )
            )
        )
        await call.read()
        (found,) = await asyncio.to_thread(blocks_of, [status_of(address)])
        call.cancel()
    assert found.error == ""
    (owner,) = found.ledger.owners
    assert (owner.request_id, owner.stage) == ("waiting-one", "awaiting_kv")
    assert owner.ticket_id
    assert len(owner.block_ids) >= 10
    assert not found.ledger.orphan_block_ids
    every = [*found.ledger.free_block_ids, *found.ledger.cached_block_ids, *owner.block_ids]
    assert sorted(every) == list(range(len(every)))


def test_a_worker_that_does_not_answer_is_said_so(capsys: Any) -> None:
    found = blocks_of([status_of("127.0.0.1:1")])
    assert "UNAVAILABLE" in found[0].error
    print_blocks(found)
    assert capsys.readouterr().out == f"d at 127.0.0.1:1: {found[0].error}\n"


def test_owners_and_orphans_are_shown(capsys: Any) -> None:
    ledger = worker_pb2.ListBlocksResponse(
        free_block_ids=[0, 1], cached_block_ids=[2], orphan_block_ids=[5]
    )
    owner = {"request_id": "r-1", "choice": 2, "stage": "moving", "ticket_id": 255}
    ledger.owners.add(block_ids=[3, 4], **owner)
    found = [WorkerBlocks("d", "h:1", ledger)]
    print_blocks(found)
    assert capsys.readouterr().out.splitlines() == [
        "d at h:1: 2 free, 1 cached, 2 owned, 1 orphans",
        "  r-1 choice 2: 2 blocks, moving, ticket 00000000000000ff",
    ]
    assert json.loads(json.dumps(as_json(found))) == [
        {
            "worker_id": "d",
            "address": "h:1",
            "error": "",
            "free_block_ids": [0, 1],
            "cached_block_ids": [2],
            "orphan_block_ids": [5],
            "owners": [{**owner, "block_ids": [3, 4]}],
        }
    ]


def test_the_command_offers_it() -> None:
    from baton.cli.main import app

    assert (
        "--blocks" in CliRunner().invoke(app, ["status", "--help"], env={"COLUMNS": "100"}).output
    )
