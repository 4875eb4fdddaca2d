"""The link to a worker over gRPC: one stream, shared by all the sequences there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from baton.commands import Abort, SequenceCommand
from baton.errors import BatonError, Cancelled, DeadlineExceeded, NoWorkers, WorkerLost
from baton.events import Failed, is_last
from baton.rpc.status import from_rpc_error
from baton.types import KvSource, SequenceSpec
from baton.v1 import sequence_pb2, sequence_service_pb2, sequence_service_pb2_grpc
from baton.wire import command_to_proto, step_from_proto, write_sequence
from gateway.links.worker_link import Sink
from gateway.long_work import in_pieces, let_others_run

#: How often a worker is given the list of its sequences that are known here, in seconds.
AUDIT_S = 5.0


def worker_error(error: grpc.RpcError, address: str) -> BatonError:
    """What a failed call to a worker means here: one that cannot be reached is lost."""
    result = from_rpc_error(error, peer="worker", address=address)
    if isinstance(result, NoWorkers | Cancelled | DeadlineExceeded):
        return WorkerLost(result.message)
    return result


class GrpcWorkerLink:
    """A worker's SequenceService on a channel that somebody else owns."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = sequence_service_pb2_grpc.SequenceServiceStub(channel)
        self._address = address
        self._commands: list[tuple[sequence_service_pb2.ServeRequest, SequenceSpec | None]] = []
        """To be written; an opening with what it opens, whose tokens it has not yet. Unbounded,
        because what is placed on a worker is bounded."""
        self._has_commands = asyncio.Event()
        self._sinks: dict[int, Sink] = {}
        self._num_handles = 0
        self._lost: str | None = None

    def open(
        self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink], send_to: bytes = b""
    ) -> int:
        """See gateway.links.worker_link.WorkerLink."""
        first = self._num_handles + 1
        self._num_handles += len(sinks)
        if self._lost is not None:
            failed = Failed(WorkerLost.reason, self._lost, is_retriable=True)
            loop = asyncio.get_running_loop()
            for sink in sinks:
                loop.call_soon(sink, failed)
            return first
        self._sinks.update(enumerate(sinks, start=first))
        request = sequence_service_pb2.ServeRequest()
        opening = request.open
        opening.handle = first
        write_sequence(spec, opening.sequence)
        opening.source = sequence_service_pb2.KvSource.ValueType(source)
        opening.send_to = send_to
        self._put(request, spec)
        return first

    def send(self, handle: int, command: SequenceCommand) -> None:
        """See gateway.links.worker_link.WorkerLink."""
        if isinstance(command, Abort) and self._sinks.pop(handle, None) is None:
            return
        self._put(command_to_proto(handle, command))

    async def run(self) -> None:
        """Carry commands and events until the stream ends; always raises, WorkerLost or what the
        worker said.

        The owner calls `lose` afterwards: not before nobody places new sequences here any more.
        """
        call = self._stub.Serve()
        writer = asyncio.create_task(self._write(call))
        auditor = asyncio.create_task(self._send_known())
        try:
            while isinstance(response := await call.read(), sequence_service_pb2.ServeResponse):
                for handle, event in step_from_proto(response):
                    sink = self._sinks.get(handle)
                    if sink is None:
                        continue  # aborted here while this was on its way
                    if is_last(event):
                        del self._sinks[handle]
                    sink(event)
            raise WorkerLost(f"the worker at {self._address} ended its stream")
        except grpc.aio.AioRpcError as error:
            raise worker_error(error, self._address) from error
        finally:
            writer.cancel()
            auditor.cancel()
            call.cancel()
            await asyncio.wait((writer, auditor))

    def lose(self, reason: str) -> None:
        """The worker is gone: every sequence gets Failed. Idempotent."""
        self._lost = reason
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(Failed(WorkerLost.reason, reason, is_retriable=True))

    async def _send_known(self) -> None:
        """Have the worker end what nobody waits for here: a sequence that a fault of ours forgot
        holds its blocks no longer."""
        while True:
            await asyncio.sleep(AUDIT_S)
            known = sequence_service_pb2.KnownSequences(handles=self._sinks)
            self._put(sequence_service_pb2.ServeRequest(known=known))

    def _put(
        self, command: sequence_service_pb2.ServeRequest, spec: SequenceSpec | None = None
    ) -> None:
        if self._lost is None:
            self._commands.append((command, spec))
            self._has_commands.set()

    async def _write(self, call: Any) -> None:
        """Send commands in order. A stream that breaks is the reader's to report."""
        try:
            while True:
                await self._has_commands.wait()
                self._has_commands.clear()
                commands, self._commands = self._commands, []
                for command, spec in commands:
                    if spec is not None:
                        await _write_tokens(spec, command.open.sequence)
                    await call.write(command)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def _write_tokens(spec: SequenceSpec, message: sequence_pb2.SequenceState) -> None:
    """In pieces, if there are many."""
    prompt, output = spec.prompt_token_ids, spec.output_token_ids
    size = len(prompt) + len(output)
    await let_others_run(size)
    await in_pieces(prompt, message.prompt_token_ids.extend)
    await in_pieces(output, message.output_token_ids.extend)
    await let_others_run(size)
