"""The gateway as a service: what it is made of, and its life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import grpc.aio

from baton.config import GatewayOptions
from baton.rpc.server import Register, RunningServer, start_server
from baton.service import OnReady, ReadyReport
from baton.types import Tier
from baton.v1 import inference_pb2, inference_pb2_grpc
from gateway.chat import ChatRenderer
from gateway.dispatcher import Dispatcher
from gateway.fleet import Fleet
from gateway.phase_clock import PhaseClock
from gateway.relay import RelayContext
from gateway.service import InferenceService, ServiceOptions
from gateway.tokenizer import Tokenizer, load_tokenizer
from gateway.workers import keep_connected

_log = logging.getLogger(__name__)

#: How long the ready line waits for the workers that were named.
WORKERS_TIMEOUT_S = 5.0

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


async def serve_gateway(options: GatewayOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Gateway: takes requests, passes each from a prefill to a decode worker, and streams the answer."""
    # The docstring is the command's help. Serves at once, whatever workers are there; raises StartupError if there is
    # no tokenizer, or if the address is taken.
    clock = PhaseClock()
    tokenizer = await asyncio.to_thread(load_tokenizer, options.tokenizer_name, options.revision)
    clock.lap("tokenizer")
    fleet = Fleet(options.prefill_workers, options.decode_workers)
    dispatcher = Dispatcher(
        fleet, max_queue_size=options.max_queue_size, key=secrets.token_bytes(32)
    )
    context = RelayContext(fleet, dispatcher, tokenizer.decode, options.client_stall_timeout_s)
    async with _chat_renderer(tokenizer) as chat:
        service = InferenceService(
            ServiceOptions(options.model_name, options.request_timeout_s),
            context,
            tokenizer,
            chat,
        )
        server = await start_server(
            f"{options.host}:{options.port}", _register(service), is_serving=False
        )
        jobs = [dispatcher.run(), *(keep_connected(fleet, address) for address in fleet.workers)]
        async with _background(jobs):
            fleet.listen(lambda: _set_health(server, fleet))
            try:
                await _wait_for_workers(fleet)
                clock.lap("workers")
                on_ready(ReadyReport(server.address, clock.phases))
                await stop.wait()
            finally:
                await server.stop(options.drain_timeout_s if stop.is_set() else None)


def _register(service: InferenceService) -> Register:
    def register(server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        return (SERVICE_NAME,)

    return register


def _set_health(server: RunningServer, fleet: Fleet) -> None:
    """Serving means that some sequence could be placed."""
    is_serving = bool(fleet.ready(Tier.DECODE))
    for name in server.service_names:
        server.set_serving(name, is_serving)


async def _wait_for_workers(fleet: Fleet) -> None:
    """Until every worker named is ready, but not for long: who is missing may join later."""
    changed = asyncio.Event()
    fleet.listen(changed.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WORKERS_TIMEOUT_S):
            while not all(worker.is_ready for worker in fleet.workers.values()):
                changed.clear()
                await changed.wait()


@contextlib.asynccontextmanager
async def _chat_renderer(tokenizer: Tokenizer) -> AsyncIterator[ChatRenderer | None]:
    facts = tokenizer.facts
    if facts.chat_template is None:
        yield None
        return
    chat = ChatRenderer(facts.chat_template, facts.special_tokens)
    try:
        await chat.start()  # before any gRPC thread: a fork beside them makes gRPC complain
        yield chat
    finally:
        await chat.close()


@contextlib.asynccontextmanager
async def _background(jobs: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run jobs beside the body, and end them with it. A job that fails ends the body, too."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
