"""The gateway process: construction of its parts, start and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton import __version__
from baton.config import GatewayOptions
from baton.errors import StartupError
from baton.registry import PipeRegistry, StaticRegistry, make_board, make_lease, make_registry
from baton.rpc.api_key import ApiKeyInterceptor, digest_of
from baton.rpc.server import Register, RunningServer, start_server
from baton.rpc.tls import server_credentials
from baton.sampling_params import describe_values
from baton.service import OnReady, ReadyReport
from baton.start_log import PhaseClock, report_phase
from baton.telemetry import Telemetry, TelemetrySettings, running_telemetry
from baton.telemetry.metrics import observe_build
from baton.types import Tier
from baton.v1 import inference_pb2, inference_pb2_grpc
from gateway.chat.renderer import ChatRenderer
from gateway.chat.style import ChatStyle, chat_style
from gateway.http.app import HttpApp, HttpSettings, Probes
from gateway.http.server import HttpServer, start_http
from gateway.intake.api_keys import KeySettings, read_api_keys
from gateway.intake.grammars import GrammarCompiler
from gateway.intake.sampling_defaults import sampling_defaults
from gateway.intake.tokenizer import Tokenizer, load_tokenizer
from gateway.links.roles import set_role
from gateway.request.driver import RequestDeps
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet
from gateway.routing.fleets import Fleets
from gateway.routing.gauges import (
    DISCOVERY_PATH,
    observe_gateway,
    observe_planner,
    scrape_targets,
)
from gateway.routing.migrator import Migrator
from gateway.routing.planner.size import Bounds
from gateway.routing.planner.steering import Steering
from gateway.routing.rivals import share_counters
from gateway.routing.workers import Membership, Roster, keep_connected
from gateway.service import InferenceService
from gateway.serving import Models, Serving, ServingOptions
from gateway.telemetry.recorder import GatewayRecorder

if TYPE_CHECKING:
    from gateway.openengine.service import OpenEngineService

_log = logging.getLogger(__name__)

#: Maximum seconds that the ready line waits for named workers.
WORKERS_TIMEOUT_S = 5.0

#: Maximum fields of a gRPC message: above the number that the largest valid conversation with tools
#: and biases needs, and few enough to parse in milliseconds.
MAX_MESSAGE_FIELDS = 2**14

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True, slots=True)
class _Model:
    """One served model: its tokenizer and its fleet of workers."""

    name: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    style: ChatStyle
    defaults: Mapping[str, Any]
    """The model's sampling defaults."""
    chat: ChatRenderer | None
    grammars: GrammarCompiler
    fleet: Fleet
    dispatcher: Dispatcher
    migrator: Migrator
    steering: Steering | None

    async def close(self) -> None:
        for part in (self.tokenizer, self.chat, self.grammars):
            if part is not None:
                await part.close()

    def jobs(
        self, options: GatewayOptions, has_accounts: bool
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """To run while the model is served."""
        yield self.dispatcher.run()
        yield self.migrator.run()
        if self.steering:
            yield self.steering.run()
        if has_accounts and (board := make_board(options.registry, self.name)):
            yield share_counters(self.dispatcher.shares, self.dispatcher.take_shares, board)

    def serving(
        self,
        options: GatewayOptions,
        accounts: Mapping[bytes, KeySettings],
        recorder: GatewayRecorder,
        unsorted: Fleet | None,
    ) -> Serving:
        timeout_s = options.request_timeout_s
        return Serving(
            ServingOptions(
                self.name,
                timeout_s,
                bool(accounts),
                self.aliases,
                self.defaults,
                options.max_logprobs,
                options.slo_by_class,
                {account: settings.slo_class for account, settings in accounts.items()},
            ),
            RequestDeps(
                self.fleet,
                self.dispatcher,
                self.tokenizer.decodings,
                options.client_stall_timeout_s,
                self.migrator,
                time.monotonic,
            ),
            self.tokenizer,
            self.chat,
            self.grammars,
            recorder,
            unsorted=unsorted,
        )


async def _load_model(
    own: GatewayOptions, options: GatewayOptions, weights: Mapping[bytes, float]
) -> _Model:
    """Load the tokenizer of one model and create its parts. own: options of this model. weights: of
    accounts. Raises StartupError without a tokenizer."""
    tokenizer_name = own.tokenizer or own.model
    try:
        tokenizer = await asyncio.to_thread(
            load_tokenizer, tokenizer_name, own.revision, own.chat_template
        )
    except StartupError as error:  # `baton serve` goes on without this model
        error.metadata = {**error.metadata, "model": own.model_name}
        raise
    facts = tokenizer.facts
    is_used = own.generation_config == "auto"
    template = facts.chat_template
    fleet = Fleet(numerics_policy=options.numerics, slo=options.slo)
    dispatcher = Dispatcher(
        fleet,
        max_queue_size=options.max_queue_size,
        key=secrets.token_bytes(32),
        max_prefixes=options.max_remembered_prefixes,
        weights=weights,
    )
    return _Model(
        own.model_name,
        options.aliases_of(own.model_name),
        tokenizer,
        chat_style(template or "", own.tool_call_parser, own.reasoning_parser),
        sampling_defaults(facts.generation_config if is_used else {}),
        None if template is None else ChatRenderer(template, facts.special_tokens),
        # Its process starts on the first structured output.
        GrammarCompiler(facts.folder, max_whitespace=options.max_json_whitespace),
        fleet,
        dispatcher,
        Migrator(fleet, dispatcher),
        _steering(own, fleet, dispatcher),
    )


def _steering(own: GatewayOptions, fleet: Fleet, dispatcher: Dispatcher) -> Steering | None:
    """The planner's part that gives orders; None without a planner. own: options of the model."""
    if own.planner == "off":
        return None
    most, fd = own.max_workers, own.number_fd

    def report(number: int) -> None:
        _log.info("workers wanted for %s: %d", own.model_name, number)
        if fd is not None:
            line = json.dumps({"model": own.model_name, "workers": number})
            with contextlib.suppress(BrokenPipeError):  # the supervisor has ended
                os.write(fd, f"{line}\n".encode())

    return Steering(
        fleet,
        dispatcher.log,
        make_lease(own.registry, own.model_name),
        functools.partial(set_role, tls=own.worker_tls),
        bounds=None if most is None else Bounds(own.min_workers or 1, most),
        on_number=report,
        clock=time.monotonic,
    )


#: New objects per collection of the youngest generation, these per one of the middle generation,
#: and those per full one; 700, 10 and 10 by default. Requests leave nothing in cycles, and a
#: collection stops the loop: a full one for a hundred milliseconds where a thousand of them run,
#: and one of the middle generation for ten under overload.
_COLLECTIONS = (5_000, 5, 200)


async def serve_gateway(options: GatewayOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Gateway: takes requests, passes each from a prefill to a decode worker, and streams the
    answer."""
    # The docstring is the command's help. Serves at once, with or without workers; raises
    # StartupError without a tokenizer, or if the address is taken.
    clock = PhaseClock()
    gc.set_threshold(*_COLLECTIONS)
    api_keys = read_api_keys(options)
    report_phase("loading tokenizer")
    accounts = {digest_of(key): settings for key, settings in api_keys.items()}
    weights = {account: settings.weight for account, settings in accounts.items()}
    parts = [await _load_model(own, options, weights) for own in options.each_model()]
    clock.lap("tokenizer")
    fleets = [part.fleet for part in parts]
    # One membership for all models, because the registry lists addresses without models.
    members = Fleets({part.name: part.fleet for part in parts}) if len(parts) > 1 else fleets[0]
    unsorted = members.unsorted if isinstance(members, Fleets) else None
    observed = fleets if unsorted is None else [*fleets, unsorted]
    supervisor = None if options.workers_fd is None else PipeRegistry(options.workers_fd)
    static = supervisor or StaticRegistry(options.prefill_workers, options.decode_workers)
    async with (
        contextlib.AsyncExitStack() as stack,
        running_telemetry(
            _telemetry_settings(options), pages={DISCOVERY_PATH: lambda: scrape_targets(observed)}
        ) as telemetry,
    ):
        for part in parts:
            stack.push_async_callback(part.close)
        observe_build(telemetry.meter, __version__)
        observe_gateway(telemetry.meter, observed, [part.dispatcher for part in parts])
        observe_planner(
            telemetry.meter, {part.name: part.steering for part in parts if part.steering}
        )
        defer = asyncio.get_running_loop().call_soon
        recorder = GatewayRecorder(telemetry, time.monotonic, defer)
        models = Models(
            [part.serving(options, accounts, recorder, unsorted) for part in parts], recorder
        )
        server = await start_server(
            f"{options.host}:{options.port}",
            _register(InferenceService(models), _openengine(options, models)),
            is_serving=False,
            reuse_port=options.reuse_port,
            credentials=_credentials(options),
            interceptors=(ApiKeyInterceptor(api_keys),) if api_keys else (),
            max_fields=MAX_MESSAGE_FIELDS,
        )
        styles = {part.name: part.style for part in parts}
        http = await _start_http(options, models, styles, recorder, fleets, telemetry, api_keys)
        connect = functools.partial(
            keep_connected, tls=options.worker_tls, stall_timeout_s=options.worker_stall_timeout_s
        )
        jobs = [Roster(members, connect=connect).follow(static)]
        for part in parts:
            listed = make_registry(options.registry, part.name)
            jobs.append(Roster(part.fleet, connect=connect).follow(listed))
            jobs += part.jobs(options, bool(api_keys))
        async with _background(jobs):
            for fleet in fleets:
                fleet.listen(lambda: _set_health(server, fleets))
            try:
                report_phase("waiting for workers")
                async with _stopping_at(stop):
                    if supervisor:
                        await supervisor.wait_complete()
                    await _wait_for_workers(members, fleets, options)
                    clock.lap("workers")
                    http_address = http.address if http else ""
                    on_ready(
                        ReadyReport(
                            server.address,
                            clock.phases,
                            http_address=http_address,
                            sampling_defaults=_described_defaults(parts),
                        )
                    )
                    for part in parts:
                        if part.chat:  # deferred: these imports would delay connecting to workers
                            await part.chat.start()
                await stop.wait()
            finally:
                grace_s = options.drain_timeout_s if stop.is_set() else None
                stops = [server.stop(grace_s), *([http.stop(grace_s)] if http else [])]
                await asyncio.gather(*stops)


def _described_defaults(parts: Sequence[_Model]) -> str:
    described = {part.name: describe_values(part.defaults) for part in parts if part.defaults}
    return "; ".join(
        text if len(parts) == 1 else f"{name}: {text}" for name, text in described.items()
    )


def _telemetry_settings(options: GatewayOptions) -> TelemetrySettings:
    return TelemetrySettings(
        service="gateway",
        instance=_instance(),
        version=__version__,
        model=options.model_name,
        metrics_host=options.host,
        metrics_port=options.metrics_port,
        metrics_compat=options.metrics_compat,
        has_page=options.enable_http,
    )


async def _start_http(
    options: GatewayOptions,
    models: Models,
    styles: Mapping[str, ChatStyle],
    recorder: GatewayRecorder,
    fleets: Sequence[Fleet],
    telemetry: Telemetry,
    api_keys: Iterable[str],
) -> HttpServer | None:
    port, prometheus = options.bound_http_port, telemetry.prometheus
    if port is None or prometheus is None:
        return None

    async def metrics(accept: str) -> tuple[bytes, str]:
        return await asyncio.to_thread(prometheus.page, accept)

    probes = Probes(is_serving=lambda: _is_serving(fleets), metrics=metrics)

    settings = HttpSettings(
        styles,
        tuple(api_keys),
        options.allowed_origins,
        int(time.time()),
        root_path=options.root_path or "",
        has_metrics=options.enable_per_request_metrics,
        response_store_bytes=options.response_store_bytes or 0,
        response_store_s=options.response_store_s,
    )
    app = HttpApp(models, recorder, probes, settings)
    return await start_http(
        app,
        options.host,
        port,
        tls=options.tls,
        requires_client_cert=options.requires_client_cert,
        reuse_port=options.reuse_port,
    )


def _credentials(options: GatewayOptions) -> grpc.ServerCredentials | None:
    if options.tls is None:
        return None
    return server_credentials(options.tls, requires_client_cert=options.requires_client_cert)


def _register(service: InferenceService, openengine: OpenEngineService | None) -> Register:
    def register(server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        if openengine is None:
            return (SERVICE_NAME,)
        return (SERVICE_NAME, *openengine.add_to(server))

    return register


def _openengine(options: GatewayOptions, models: Models) -> OpenEngineService | None:
    if not options.enable_openengine:
        return None
    # Imported on demand: most gateways do not serve this API.
    from gateway.openengine.service import OpenEngineService

    return OpenEngineService(models, _instance())


def _instance() -> str:
    return f"gateway-{socket.gethostname()}-{os.getpid()}"


def _is_serving(fleets: Sequence[Fleet]) -> bool:
    """Whether a new sequence could be placed."""
    return any(fleet.ready(Tier.DECODE) for fleet in fleets)


def _set_health(server: RunningServer, fleets: Sequence[Fleet]) -> None:
    is_serving = _is_serving(fleets)
    for name in server.service_names:
        server.set_serving(name, is_serving)


async def _wait_for_workers(
    members: Membership, fleets: Sequence[Fleet], options: GatewayOptions
) -> None:
    """Wait until all named and listed workers are ready, at most WORKERS_TIMEOUT_S; others may join
    later.

    With a registry, also wait for one decode worker per model, without which the model cannot be
    served.
    """
    named = {*options.prefill_workers, *options.decode_workers}

    def is_complete() -> bool:
        is_served = options.registry is None or all(f.ready(Tier.DECODE) for f in fleets)
        workers = members.workers
        is_all_ready = all(worker.is_ready for worker in workers.values())
        return is_served and is_all_ready and named <= workers.keys()

    changed = asyncio.Event()
    for fleet in fleets:
        fleet.listen(changed.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WORKERS_TIMEOUT_S):
            while not is_complete():
                changed.clear()
                await changed.wait()


@contextlib.asynccontextmanager
async def _stopping_at(stop: asyncio.Event) -> AsyncIterator[None]:
    """Run the body until it ends, or cancel it once `stop` is set."""
    body = asyncio.timeout(None)

    async def interrupt() -> None:
        await stop.wait()
        body.reschedule(asyncio.get_running_loop().time())

    waiting = asyncio.create_task(interrupt())
    try:
        async with body:
            yield
    except TimeoutError:
        if not body.expired():
            raise
    finally:
        waiting.cancel()


@contextlib.asynccontextmanager
async def _background(jobs: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run jobs beside the body, and cancel them at its end. A job that fails ends the body."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
