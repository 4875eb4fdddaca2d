"""Turns whatever a handler raises into a rich status, in one place.

Messages are parsed here, too, and not by grpc, which answers what cannot be parsed with UNKNOWN and
logs a traceback for each: it is INVALID_ARGUMENT.

BatonError -> its own code and details. Any other exception -> INTERNAL, with a traceback in the log
under the request id; neither log nor status repeats the exception's message, which may hold a
user's text. Cancellation and explicit aborts pass untouched. Handlers are coroutine functions or
async generator functions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.errors import BY_REASON, BatonError, Cancelled, EngineFault, InvalidRequest
from baton.rpc.message_fields import has_more_fields
from baton.rpc.status import REQUEST_ID_KEY, abort

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
# Any: the stubs know the behaviours of grpc's synchronous servers only.
_Behavior = Any

# Quoted: only the stubs have type arguments.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
"""What an interceptor asks for the handler of a call; None if there is no such method."""

#: Bytes of a message from which on its fields are counted before they are read.
_LONG_BYTES = 65_536

#: Bytes of a message from which on others get something after it was read, and what, in seconds: to
#: read and look at megabytes of text takes tens of milliseconds.
_PAUSED_BYTES, _PAUSE_S = 2**18, 0.005

#: Bytes to a message.
_Parse = Callable[[bytes], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server, and knows when none runs. Belongs to one event loop."""

    def __init__(self, max_fields: int | None = None) -> None:
        """max_fields: of a long message, those within it too; None for any number."""
        self._max_fields = max_fields
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._wrapped: dict[Handler, Handler] = {}
        """By the handlers, of which a server has a few that stay the same."""

    async def wait_idle(self) -> None:
        """Returns when no handler runs, the clean-up of cancelled ones included."""
        await self._is_idle.wait()

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler, wrapped; None for a method that does not exist, which grpc answers
        itself."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler not in self._wrapped:
            self._wrapped[handler] = self._wrap(handler, handler_call_details.method)
        return self._wrapped[handler]

    def _wrap(self, handler: Handler, method: str) -> Handler:
        parse = self._within_limits(handler.request_deserializer or bytes)
        takes_stream, answers_stream = handler.request_streaming, handler.response_streaming

        def wrap(behavior: _Behavior) -> _Behavior:
            async def call(raw: Any, context: _Context) -> Any:
                self._num_running += 1
                self._is_idle.clear()
                try:
                    request = _each_parsed(raw, parse) if takes_stream else _parsed(raw, parse)
                    if not takes_stream and len(raw) >= _PAUSED_BYTES:  # others waited for that
                        await asyncio.sleep(_PAUSE_S)
                    result = behavior(request, context)
                    return await (_drain(result, context) if answers_stream else result)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001, the one border where any failure becomes a status
                    # InternalError: nobody is there any more to take it, or its time is over. grpc
                    # knows that the call was aborted, and ends it without a word when the handler
                    # returns.
                    with suppress(grpc.aio.InternalError):
                        await _fail(context, method, error)
                finally:
                    self._num_running -= 1
                    if self._num_running == 0:
                        self._is_idle.set()

            return call

        return with_behavior(handler, wrap, is_parsed=False)

    def _within_limits(self, parse: _Parse) -> _Parse:
        """parse: FromString of a message's class, or what makes anything else of bytes."""
        kind, most = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None), self._max_fields
        if kind is None or most is None:
            return parse

        def parse_few(raw: bytes) -> Any:
            if len(raw) >= _LONG_BYTES and has_more_fields(raw, kind, most):
                raise InvalidRequest(
                    f"the message of {len(raw)} bytes has more than {most} fields, those of "
                    "messages within it counted; send fewer"
                )
            return parse(raw)

        return parse_few


def with_behavior(
    handler: Handler,
    wrap: Callable[[_Behavior], _Behavior],
    *,
    is_parsed: bool = True,
) -> Handler:
    """The same handler with its behaviour wrapped. is_parsed: whether it takes messages, or else
    their bytes."""
    streams = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    deserializer = handler.request_deserializer if is_parsed else None
    remade: Handler = make(wrap(getattr(handler, kind)), deserializer, handler.response_serializer)
    return remade


async def send_headers(context: _Context, *headers: tuple[str, str]) -> None:
    """Open a stream's answer before there is any of it: a gRPC client asks for the first message
    only once it has the headers, so that a late answer does not wait for that, too. Raises
    Cancelled as write_to does."""
    try:
        await context.send_initial_metadata(headers)
    except grpc.aio.InternalError:
        raise Cancelled("the caller's connection broke") from None


async def write_to(context: _Context, response: Any) -> None:
    """Send a piece of a stream. Raises Cancelled if the caller's connection has broken: grpc itself
    reports that as a fault of its own, unless it has cancelled the handler before."""
    try:
        await context.write(response)
    except grpc.aio.InternalError:
        raise Cancelled("the caller's connection broke") from None


def _parsed(raw: bytes, parse: _Parse) -> Any:
    try:
        return parse(raw)
    except DecodeError:
        raise InvalidRequest(
            f"the {len(raw)} bytes sent are no message of this call; is the client's version of "
            "protos/ the server's?"
        ) from None


async def _each_parsed(raws: AsyncIterator[bytes], parse: _Parse) -> AsyncIterator[Any]:
    async for raw in raws:
        yield _parsed(raw, parse)


async def _drain(result: Any, context: _Context) -> None:
    """Send what a streaming handler yields. Its clean-up has run when this returns, cancelled or
    not."""
    if not isinstance(result, AsyncIterator):
        await result
        return
    async with aclosing(result) as responses:  # type: ignore[type-var]
        async for response in responses:
            await write_to(context, response)


async def _fail(context: _Context, method: str, error: Exception) -> NoReturn:
    if isinstance(error, BatonError) and error.reason in BY_REASON:
        await abort(context, error)
    request_id = given_request_id(context.invocation_metadata()) or uuid.uuid4().hex
    _log.error(
        "%s failed: %s\n%s",
        method,
        type(error).__name__,
        "".join(_frames(error)),
        extra={"request_id": request_id},
    )
    await abort(
        context,
        EngineFault(
            f"{type(error).__name__} in {method}; the server's log has the cause "
            f"under request id {request_id}",
            request_id=request_id,
        ),
    )


def _frames(error: BaseException) -> list[str]:
    """The traceback of an error and of its causes, without their messages."""
    cause = error.__cause__ or error.__context__
    above = [*_frames(cause), f"then {type(error).__name__}:\n"] if cause else []
    return [*above, *traceback.format_tb(error.__traceback__)]


def given_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The caller's x-request-id, the first if there are several; empty if there is none, or it is
    not 1 to 128 of [A-Za-z0-9_.:-]."""
    given = next((value for key, value in metadata or () if key == REQUEST_ID_KEY), "")
    return given if isinstance(given, str) and _REQUEST_ID.fullmatch(given) else ""
