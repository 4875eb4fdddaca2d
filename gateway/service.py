"""The gRPC door: converts calls to requests and streams their output."""

from __future__ import annotations

import functools
from typing import Any

import grpc.aio

from baton.rpc.interceptor import send_headers, write_to
from baton.rpc.status import REQUEST_ID_KEY
from baton.v1 import inference_pb2, inference_pb2_grpc
from gateway.intake.request import ValidatedRequest
from gateway.long_work import in_pieces
from gateway.serving import Call, Models

_Context = grpc.aio.ServicerContext[Any, Any]

#: Time that a request's last status needs to leave before its deadline, at which gRPC ends the call
#: without details: seconds, and at most this share of the time that it has.
_STATUS_S, _STATUS_SHARE = 0.02, 0.1


def usable_time_s(remaining_s: float | None) -> float | None:
    """The time for a request that has `remaining_s` seconds to its deadline. None: without one."""
    if remaining_s is None:
        return None
    return remaining_s - min(_STATUS_S, _STATUS_SHARE * remaining_s)


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """gRPC InferenceService. Belongs to one event loop."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Stream by context.write, which applies backpressure from slow clients."""

        async def on_admitted(admitted: ValidatedRequest) -> None:
            await send_headers(context, (REQUEST_ID_KEY, admitted.spec.request_id))

        call = Call(
            metadata=context.invocation_metadata() or (),
            write=functools.partial(write_to, context),
            timeout_s=usable_time_s(context.time_remaining()),
            on_admitted=on_admitted,
        )
        serving = self._models.of(request.model)
        serving.check_room(request, call)  # before its turn, since that costs next to nothing
        await self._models.turns.take()
        await serving.generate(request, call)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a prompt, as Generate uses them."""
        serving = self._models.of(request.model)
        response = inference_pb2.TokenizeResponse(max_model_len=serving.facts.max_model_len)
        await in_pieces(await serving.tokenize(request), response.token_ids.extend)
        return response

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        """Decode token ids to text."""
        serving = self._models.of(request.model)
        return inference_pb2.DetokenizeResponse(text=await serving.detokenize(request))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        """All models, each followed by its adapters."""
        return inference_pb2.ListModelsResponse(
            models=[
                serving.model(name)
                for serving in self._models
                for name in ("", *serving.facts.adapters)
            ]
        )

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: _Context
    ) -> inference_pb2.GetModelResponse:
        """One model and its workers."""
        serving = self._models.of(request.model)
        return inference_pb2.GetModelResponse(model=serving.model(request.model))
