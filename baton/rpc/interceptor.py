"""Converts every exception of a handler into a rich status, in one place.

Messages are parsed here, because grpc answers malformed ones with UNKNOWN and logs a traceback for
each; here they are INVALID_ARGUMENT.

BatonError -> its own code and details. Any other exception -> INTERNAL, with a traceback in the log
under the request id; neither log nor status contains the exception's message, which may quote user
text. Cancellation and explicit aborts pass through. Handlers are coroutine functions or async
generator functions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.errors import BY_REASON, BatonError, Cancelled, EngineFault, InvalidRequest
from baton.rpc.message_fields import has_more_fields
from baton.rpc.status import REQUEST_ID_KEY, abort, set_status

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
# Any: the stubs describe the handlers of grpc's synchronous servers only.
_Behavior = Any

# Quoted: only the stubs have type arguments.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
"""Returns the handler of a call; None for an unknown method."""

#: Bytes of a message above which its fields are counted before parsing.
_LONG_BYTES = 65_536

#: Bytes of a message above which the handler first pauses, and the pause in seconds: parsing and
#: validating megabytes of text takes tens of milliseconds, in which other calls wait.
_PAUSED_BYTES, _PAUSE_S = 2**18, 0.005

#: Parses bytes to a message.
_Parse = Callable[[bytes], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server, and tracks running ones. Belongs to one event loop."""

    def __init__(self, max_fields: int | None = None) -> None:
        """max_fields: maximum of a long message, including nested ones; None for no limit."""
        self._max_fields = max_fields
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._wrapped: dict[Handler, Handler] = {}
        """Wrapped handlers, by original. A server has few, which never change."""

    async def wait_idle(self) -> None:
        """Wait until no handler runs, including the clean-up of cancelled ones."""
        await self._is_idle.wait()

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler; None for an unknown method, which grpc answers itself."""
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
                    if not takes_stream and len(raw) >= _PAUSED_BYTES:  # let other calls run
                        await asyncio.sleep(_PAUSE_S)
                    result = behavior(request, context)
                    return await (_drain(result, context) if answers_stream else result)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001, the one border where any failure becomes a status
                    if answers_stream:
                        # An abort leaves a cycle of the call and the exception's frames, which
                        # waits for the garbage collector with all that they have.
                        set_status(context, _error_of(context, method, error))
                        return None
                    # InternalError: the client is gone, or the deadline has passed. grpc has
                    # recorded the abort, and ends the call silently when the handler returns.
                    with suppress(grpc.aio.InternalError):
                        await abort(context, _error_of(context, method, error))
                finally:
                    self._num_running -= 1
                    if self._num_running == 0:
                        self._is_idle.set()

            return call

        return with_behavior(handler, wrap, is_parsed=False)

    def _within_limits(self, parse: _Parse) -> _Parse:
        """Wrap `parse` with the limit of fields. parse: FromString of a message class, or another
        parser."""
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
    """The same handler with its behaviour wrapped. is_parsed: whether it takes messages instead of
    bytes."""
    streams = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    deserializer = handler.request_deserializer if is_parsed else None
    remade: Handler = make(wrap(getattr(handler, kind)), deserializer, handler.response_serializer)
    return remade


async def send_headers(context: _Context, *headers: tuple[str, str]) -> None:
    """Send a stream's headers before its first message. A gRPC client requests the first message
    only after the headers, so sending them early saves a round trip. Raises Cancelled as write_to
    does."""
    try:
        await context.send_initial_metadata(headers)
    except grpc.aio.InternalError:
        raise Cancelled("the caller's connection broke") from None


async def write_to(context: _Context, response: Any) -> None:
    """Send a message of a stream. Raises Cancelled if the connection has broken, which grpc
    otherwise reports as an internal error, unless it has cancelled the handler before."""
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
    """Send all that a streaming handler yields. On return the handler's clean-up has run, even
    after a cancellation."""
    if not isinstance(result, AsyncIterator):
        await result
        return
    async with aclosing(result) as responses:  # type: ignore[type-var]
        async for response in responses:
            await write_to(context, response)


def _error_of(context: _Context, method: str, error: Exception) -> BatonError:
    """The error to send; what is none of ours is logged."""
    if isinstance(error, BatonError) and error.reason in BY_REASON:
        return error
    request_id = given_request_id(context.invocation_metadata()) or uuid.uuid4().hex
    _log.error(
        "%s failed: %s\n%s",
        method,
        type(error).__name__,
        "".join(_frames(error)),
        extra={"request_id": request_id},
    )
    return EngineFault(
        f"{type(error).__name__} in {method}; the server's log has the cause "
        f"under request id {request_id}",
        request_id=request_id,
    )


def _frames(error: BaseException) -> list[str]:
    """Traceback of an error and its causes, without their messages."""
    cause = error.__cause__ or error.__context__
    above = [*_frames(cause), f"then {type(error).__name__}:\n"] if cause else []
    return [*above, *traceback.format_tb(error.__traceback__)]


def given_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The caller's first x-request-id; empty if there is none, or if it is not 1 to 128 characters
    of [A-Za-z0-9_.:-]."""
    given = next((value for key, value in metadata or () if key == REQUEST_ID_KEY), "")
    return given if isinstance(given, str) and _REQUEST_ID.fullmatch(given) else ""
