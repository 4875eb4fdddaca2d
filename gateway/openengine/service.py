"""Presents a gateway and its workers as one OpenEngine engine of role AGGREGATED: both tiers are
internal to it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from baton import __version__
from baton.errors import BatonError, Cancelled, FieldViolation, InvalidRequest
from baton.rpc.interceptor import send_headers, write_to
from baton.rpc.status import REQUEST_ID_KEY
from baton.sampling_params import MAX_CHOICES, MAX_LOGPROBS
from baton.v1 import inference_pb2
from gateway.intake.request import ValidatedRequest
from gateway.openengine.output import EventStream
from gateway.openengine.requests import to_baton, with_openengine_fields
from gateway.openengine.v1 import openengine_pb2 as oe
from gateway.openengine.v1 import openengine_pb2_grpc as oe_grpc
from gateway.serving import Call, Models, unique_request_id

_Context = grpc.aio.ServicerContext[Any, Any]

#: Versions of protos/openengine/v1/openengine.proto.
_REVISION = 1
_RELEASE = "4def7c50b05e0674a0c3b26917399155535966e4"
#: Number of ended request ids that Abort remembers.
_NUM_ENDED = 1024

_NO_LOADING = "adapters are loaded when workers start: give them --lora-modules"
_GUIDES = (
    oe.GUIDED_DECODING_MODE_JSON_SCHEMA,
    oe.GUIDED_DECODING_MODE_REGEX,
    oe.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    oe.GUIDED_DECODING_MODE_CHOICE,
    oe.GUIDED_DECODING_MODE_JSON_OBJECT,
)


@dataclass(slots=True)
class _Running:
    """A running request. events: set once it is accepted."""

    task: asyncio.Task[None]
    events: EventStream | None = None
    is_aborted: bool = False


class OpenEngineService(oe_grpc.InferenceServicer, oe_grpc.ControlServicer):
    """OpenEngine's Inference and Control services. Belongs to one event loop."""

    def __init__(self, models: Models, instance_id: str) -> None:
        self._models = models
        self._instance_id = instance_id
        self._running: dict[str, _Running] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Register both services. Returns their names."""
        oe_grpc.add_InferenceServicer_to_server(self, server)
        oe_grpc.add_ControlServicer_to_server(self, server)
        services = oe.DESCRIPTOR.services_by_name
        return [service.full_name for service in services.values()]

    async def Generate(  # type: ignore[override]
        self, request: oe.GenerateRequest, context: _Context
    ) -> None:
        """Stream events by context.write, which applies backpressure. A failure before acceptance
        is the call's status; a later one is the stream's last event."""
        await self._models.turns.take()
        metadata = list(context.invocation_metadata() or ())
        request_id = request.request_id or unique_request_id(metadata)
        if request_id in self._running:
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS,
                f"request_id: {request_id!r}: such a request is running; give each its own",
            )
        running = _Running(asyncio.create_task(self._run(request, request_id, metadata, context)))
        self._running[request_id] = running
        try:
            await running.task
        except asyncio.CancelledError:
            if not running.is_aborted:
                raise
            if running.events is None:
                raise Cancelled("the request was aborted before it was accepted") from None
            await running.events.cancel()
        except InvalidRequest as error:
            await _fail(with_openengine_fields(error), running.events)
        except BatonError as error:
            await _fail(error, running.events)
        finally:
            del self._running[request_id]
            self._ended[request_id] = None
            if len(self._ended) > _NUM_ENDED:
                self._ended.popitem(last=False)

    async def _run(
        self,
        request: oe.GenerateRequest,
        request_id: str,
        metadata: list[tuple[str, str | bytes]],
        context: _Context,
    ) -> None:
        own = to_baton(request, metadata)
        if request.lora_name:
            self._models.of(request.model)
        serving = self._models.of(own.model)
        # Tokenized here, because events report the prompt's token ids.
        token_ids = await serving.tokenize(
            inference_pb2.TokenizeRequest(model=own.model, prompt=own.prompt)
        )
        own.prompt.token_ids.ids[:] = token_ids
        events = EventStream(
            functools.partial(write_to, context),
            request_id,
            own,
            request.response.prompt_logprob_start,
            serving.facts.eos_token_ids,
            serving.tokenizer.bytes_of,
        )

        async def on_admitted(_: ValidatedRequest) -> None:
            self._running[request_id].events = events
            await send_headers(context)

        call = Call(
            # The first value of a repeated name wins.
            metadata=[(REQUEST_ID_KEY, request_id), *metadata],
            write=events.write_piece,
            timeout_s=context.time_remaining(),
            on_admitted=on_admitted,
        )
        await serving.generate(own, call)

    async def GetServerInfo(
        self, request: oe.GetServerInfoRequest, context: _Context
    ) -> oe.ServerInfo:
        """Describe this gateway and its decode workers."""
        decode = list(self._decode_workers())
        return oe.ServerInfo(
            engine_name="baton",
            engine_version=__version__,
            engine_role=oe.ENGINE_ROLE_AGGREGATED,
            instance_id=self._instance_id,
            supported_models=[name for serving in self._models for name in serving.facts.names],
            schema_revision=_REVISION,
            minimum_client_revision=_REVISION,
            schema_release=_RELEASE,
            capacity=oe.DeploymentCapacity(
                kv_block_size=decode[0].block_size if decode else None,
                total_kv_blocks=sum(w.num_blocks for w in decode) if decode else None,
            ),
        )

    async def GetModelInfo(
        self, request: oe.GetModelInfoRequest, context: _Context
    ) -> oe.ModelInfo:
        """Describe one model and the request options that it supports."""
        facts = self._models.of(request.model).facts
        logprobs = oe.LogprobCapabilities(
            supported=True,
            candidate_selection_modes=[oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
            max_top_n=MAX_LOGPROBS,
        )
        return oe.ModelInfo(
            model_id=facts.name,
            served_model_name=facts.name,
            served_model_aliases=facts.aliases,
            max_context_length=facts.max_model_len,
            max_output_tokens=facts.max_model_len - 1,
            supports_text_input=True,
            supports_token_ids_input=True,
            supports_lora=False,  # requests may name an adapter; workers load them only at start
            supports_multimodal=False,
            generation=oe.GenerationCapabilities(
                prompt_logprobs=logprobs,
                output_logprobs=logprobs,
                guided_decoding=oe.GuidedDecodingCapabilities(supported=True, modes=_GUIDES),
                max_num_sequences=min(MAX_CHOICES, facts.max_num_seqs),
                supports_priority=True,
                supports_stop_in_output=True,
                supports_cache_salt=True,
                supports_prefix_cache_bypass=False,
            ),
        )

    async def GetLoad(self, request: oe.GetLoadRequest, context: _Context) -> oe.LoadInfo:
        """Load of the decode workers and of the gateway's queue."""
        decode = list(self._decode_workers())
        waiting = sum(serving.num_waiting for serving in self._models)
        return oe.LoadInfo(
            instance_id=self._instance_id,
            timestamp_unix_nanos=time.time_ns(),
            running_requests=sum(worker.num_running for worker in decode),
            queued_requests=waiting + sum(worker.num_waiting for worker in decode),
            used_kv_blocks=sum(worker.num_leased_blocks for worker in decode),
            total_kv_blocks=sum(worker.num_blocks for worker in decode),
        )

    async def Health(self, request: oe.HealthRequest, context: _Context) -> oe.HealthResponse:
        """READY if all requested checks pass. The inference probe generates one token."""
        ready, not_ready = oe.HEALTH_STATE_READY, oe.HEALTH_STATE_NOT_READY
        has_workers = any(worker.state == "ready" for worker in self._decode_workers())
        scheduler = "" if has_workers else "no decode worker is ready"
        checks = [
            oe.HealthCheck(
                name="scheduler", state=ready if has_workers else not_ready, message=scheduler
            )
        ]
        if request.role not in (oe.ENGINE_ROLE_UNSPECIFIED, oe.ENGINE_ROLE_AGGREGATED):
            checks.append(
                oe.HealthCheck(name="role", state=not_ready, message="this engine is AGGREGATED")
            )
        if request.include_inference_probe:
            wrong = await self._probe(request.model)
            checks.append(
                oe.HealthCheck(
                    name="inference_probe", state=not_ready if wrong else ready, message=wrong
                )
            )
        is_ready = all(check.state == ready for check in checks)
        return oe.HealthResponse(state=ready if is_ready else not_ready, checks=checks)

    async def Abort(self, request: oe.AbortRequest, context: _Context) -> oe.AbortResponse:
        """Abort requests of this protocol; those of other APIs continue."""
        match request.WhichOneof("target"):
            case "all_requests":
                found = list(self._running.values())
            case "request_id" if request.request_id in self._running:
                found = [self._running[request.request_id]]
            case "request_id" if request.request_id in self._ended:
                return oe.AbortResponse(status=oe.ABORT_STATUS_ALREADY_FINISHED)
            case "request_id":
                text = f"request_id: {request.request_id!r}: there is no such request here"
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
            case "kv_session":
                text = "kv_session: an AGGREGATED engine gives none out; name the request"
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
            case _:
                raise InvalidRequest.of(
                    FieldViolation("target", "not set; give request_id or all_requests")
                )
        for running in found:
            running.is_aborted = True
            running.task.cancel()
        return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED, message=f"{len(found)} requests")

    async def ListLoras(
        self, request: oe.ListLorasRequest, context: _Context
    ) -> oe.ListLorasResponse:
        """Adapters that every decode worker of their model has, numbered from 1."""
        names = [name for serving in self._models for name in serving.facts.adapters]
        adapters = [oe.LoraAdapter(lora_id=i, lora_name=n) for i, n in enumerate(names, start=1)]
        return oe.ListLorasResponse(adapters=adapters)

    async def LoadLora(self, request: oe.LoadLoraRequest, context: _Context) -> oe.LoadLoraResponse:
        """Refused."""
        return await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _NO_LOADING)

    async def UnloadLora(
        self, request: oe.UnloadLoraRequest, context: _Context
    ) -> oe.UnloadLoraResponse:
        """Refused."""
        return await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _NO_LOADING)

    async def GetKvEventSources(
        self, request: oe.GetKvEventSourcesRequest, context: _Context
    ) -> oe.GetKvEventSourcesResponse:
        """Return none: the gateway itself routes by cached prefix."""
        return oe.GetKvEventSourcesResponse()

    async def SubscribeKvEvents(  # type: ignore[override]
        self, request: oe.SubscribeKvEventsRequest, context: _Context
    ) -> None:
        """Refused."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "the gateway itself sends requests where their prefix is, and tells of no blocks",
        )

    def _decode_workers(self) -> Iterator[inference_pb2.WorkerStatus]:
        """Decode workers that have been reached; the model of others is unknown."""
        for serving in self._models:
            for worker in serving.model().workers:
                if worker.tier == "decode" and worker.worker_id:
                    yield worker

    async def _probe(self, model: str) -> str:
        """Generate one token. Returns the error message; empty on success."""
        request = inference_pb2.GenerateRequest()
        request.prompt.token_ids.ids.append(0)
        request.sampling.max_tokens = 1

        async def drop(_: inference_pb2.GenerateResponse) -> None:
            """Discard the output."""

        first = next(iter(self._models))
        try:
            serving = self._models.of(model) if model else first
            await serving.generate(request, Call(metadata=(), write=drop))
        except BatonError as error:
            return error.message
        return ""


async def _fail(error: BatonError, events: EventStream | None) -> None:
    """Report a failure. events: None before the request is accepted."""
    if events is None:
        raise error
    await events.fail(error)
