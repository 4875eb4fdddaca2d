"""Converts between baton.errors and gRPC statuses with rich details (google.rpc.Status in the
trailing metadata).

An error keeps its type, message, violations, metadata, request id and retry delay; text beyond
gRPC's metadata limit is cut. Errors of the transport itself, which have no details, are mapped by
code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from baton.errors import (
    BY_REASON,
    DOMAIN,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    ModelNotFound,
    NoWorkers,
    Overloaded,
    RetriableError,
    Unauthenticated,
    WorkerLost,
)

_M = TypeVar("_M", bound=Message)

DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"

# gRPC may refuse trailing metadata above 8 KiB. The message counts up to three times when
# percent-encoded, and once more in the details, which grow by a third in base64: 3 * 1024 + (1024 +
# 2048) * 4 / 3 < 8 KiB.
MAX_MESSAGE_BYTES = 1024
MAX_DETAILS_BYTES = 2048
# Maximum of the details' metadata, which leaves room for one violation of any length.
_MAX_INFO_BYTES = 768
_MAX_REQUEST_ID_BYTES = 128
_MAX_VALUE_BYTES = 256
_MAX_DESCRIPTION_BYTES = 512
_MAX_RETRY_S = 1e7
_REQUEST_ID_ENTRY = "request_id"

_BY_CODE: Mapping[grpc.StatusCode, type[BatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}
#: Messages of grpc clients for their own cancellation.
_CANCELLED_HERE = ("locally cancelled", "channel closed", "cancelling all calls")
#: Message of grpc.aio clients for a connection that breaks at the start of a call: INTERNAL,
#: unknown to the server.
BROKEN_AT_ITS_BEGINNING = "Internal error from Core"
_NEVER_CONNECTED = ("failed to connect", "errors resolving", "resolution", "connection refused")
_TOO_LARGE = "larger than max"
_ANSWER_TOO_LARGE = ("server: sent", "client: received")
_METADATA_TOO_LARGE = "metadata size"


class _Status(NamedTuple):
    """The attributes that grpc.ServicerContext.abort_with_status reads."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


class _GrpcStatus(_Status, grpc.Status):
    """A _Status with the type grpc.Status."""


def clip(text: str, max_bytes: int) -> str:
    """Truncate `text` to at most `max_bytes` bytes of UTF-8, including an ellipsis. Lone surrogates
    become '?'."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    mark = "…"
    return raw[: max(0, max_bytes - len(mark.encode()))].decode("utf-8", "ignore") + mark


def to_proto(error: BatonError) -> status_pb2.Status:
    """The rich status of an error, within gRPC's limits for metadata."""
    status = status_pb2.Status(
        code=error.code.value[0], message=clip(error.message, MAX_MESSAGE_BYTES)
    )
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.request_id:
        info.metadata[_REQUEST_ID_ENTRY] = clip(error.request_id, _MAX_REQUEST_ID_BYTES)
    for key, value in error.metadata.items():
        short_key, short_value = clip(key, 64), clip(value, _MAX_VALUE_BYTES)
        added_bytes = len(short_key.encode()) + len(short_value.encode()) + 8
        if info.ByteSize() + added_bytes <= _MAX_INFO_BYTES:
            info.metadata[short_key] = short_value
    _attach(status, info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        delay_s = min(max(error.retry_after_s, 0.0), _MAX_RETRY_S)
        retry.retry_delay.FromNanoseconds(round(delay_s * 1e9))
        _attach(status, retry)
    if error.request_id:
        request_id = clip(error.request_id, _MAX_REQUEST_ID_BYTES)
        _attach(status, error_details_pb2.RequestInfo(request_id=request_id))
    if isinstance(error, InvalidRequest) and error.violations:
        room = MAX_DETAILS_BYTES - sum(detail.ByteSize() + 4 for detail in status.details)
        _attach(status, _bad_request(error.violations, room))
    return status


def to_status(error: BatonError) -> grpc.Status:
    """The status of an error for abort_with_status."""
    proto = to_proto(error)
    metadata = ((DETAILS_KEY, proto.SerializeToString()),)
    return _GrpcStatus(error.code, proto.message, metadata)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """End the RPC with the error's rich status. Raises grpc.aio.AbortError, which ends the
    handler."""
    await context.abort_with_status(to_status(error))


def set_status(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> None:
    """Make the error's rich status that of the RPC, once its handler returns."""
    proto = to_proto(error)
    context.set_code(error.code)
    context.set_details(proto.message)
    context.set_trailing_metadata(((DETAILS_KEY, proto.SerializeToString()),))


def from_proto(status: status_pb2.Status) -> BatonError | None:
    """The error in a rich status; None without our ErrorInfo, or for an unknown reason."""
    info = _detail(status, error_details_pb2.ErrorInfo())
    if info is None or info.domain != DOMAIN:
        return None
    leaf = BY_REASON.get(info.reason)
    if leaf is None:
        return None
    metadata = dict(info.metadata)
    request_id = metadata.pop(_REQUEST_ID_ENTRY, "")
    error: BatonError
    if issubclass(leaf, InvalidRequest):
        error = leaf(status.message, violations=_violations(status), request_id=request_id)
    elif issubclass(leaf, RetriableError):
        error = leaf(status.message, retry_after_s=_retry_s(status), request_id=request_id)
    else:
        error = leaf(status.message, request_id=request_id)
    # Not by keyword: a peer's key may equal a parameter's name.
    error.metadata = metadata
    return error


def from_rpc_error(
    error: grpc.RpcError,
    *,
    peer: str = "gateway",
    address: str = "",
    request_id: str = "",
    is_over: bool = False,
) -> BatonError:
    """The error of a failed call: as raised by the server, or derived from the transport's code.

    peer, address: of the server, for messages that it did not write.
    request_id: used if the status has none.
    is_over: whether the call's deadline has passed. A server's gRPC then cancels the call without a
    status.
    """
    code, text, trailing = _parts(error)
    rich = from_proto(status) if (status := _rich_status(trailing)) else None
    if is_over and code is grpc.StatusCode.CANCELLED and not _is_cancelled_here(text):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    result = rich or _from_transport(code, text, f"{peer} at {address}" if address else peer)
    if not result.request_id:
        result.request_id = request_id
    return result


def _from_transport(code: grpc.StatusCode, text: str, peer: str) -> BatonError:
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return _from_lost(text or code.name, peer)
        case grpc.StatusCode.INTERNAL if text == BROKEN_AT_ITS_BEGINNING:
            return _from_lost(text, peer)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _from_exhausted(text, peer)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{peer} did not finish in time; allow more with timeout_s")
        case grpc.StatusCode.UNIMPLEMENTED:
            return BatonError(f"{peer} does not offer this call: {text}; is it a Baton server?")
    leaf = _BY_CODE.get(code, BatonError)
    return leaf(f"{peer}: {text or code.name}", code=code.name)


def _is_cancelled_here(text: str) -> bool:
    return any(mark in text.lower() for mark in _CANCELLED_HERE)


def _from_lost(text: str, peer: str) -> BatonError:
    if _is_cancelled_here(text):
        return Cancelled(f"{peer}: {text}")
    # A cancellation not requested here is a loss: a proxy or the server's transport dropped the
    # call.
    if any(mark in text.lower() for mark in _NEVER_CONNECTED):
        where = peer.replace(" at ", " not reachable at ", 1)
        where = where if where != peer else f"{peer} not reachable"
        return NoWorkers(
            f"{where}: {text}; is it running, is the address right, and do both ends use TLS, or "
            "neither?"
        )
    return WorkerLost(f"the connection to {peer} was lost: {text}")


def _from_exhausted(text: str, peer: str) -> BatonError:
    lower = text.lower()
    if _METADATA_TOO_LARGE in lower:
        return InvalidRequest.of(
            FieldViolation("metadata", f"too large ({text}); send fewer or shorter entries")
        )
    if _TOO_LARGE in lower:
        is_answer = any(mark in lower for mark in _ANSWER_TOO_LARGE)
        fix = "ask for less in one call" if is_answer else "send a shorter prompt"
        return InvalidRequest.of(FieldViolation("message", f"too large ({text}); {fix}"))
    return Overloaded(f"{peer} is full: {text}")


def _parts(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, Iterable[tuple[str, Any]]]:
    """Code, details and trailing metadata of errors of sync or aio calls."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return grpc.StatusCode.UNKNOWN, str(error), ()
    return error.code(), error.details() or "", tuple(error.trailing_metadata() or ())


def _rich_status(trailing: Iterable[tuple[str, Any]]) -> status_pb2.Status | None:
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)


def _detail(status: status_pb2.Status, into: _M) -> _M | None:
    return next((into for detail in status.details if detail.Unpack(into)), None)


def _bad_request(
    violations: Iterable[FieldViolation], room_bytes: int
) -> error_details_pb2.BadRequest:
    """The violations that fit into `room_bytes`."""
    bad = error_details_pb2.BadRequest()
    for violation in violations:
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=clip(violation.field, _MAX_VALUE_BYTES),
            description=clip(violation.description, _MAX_DESCRIPTION_BYTES),
        )
        if bad.ByteSize() + entry.ByteSize() + 64 > room_bytes:
            break
        bad.field_violations.append(entry)
    return bad


def _violations(status: status_pb2.Status) -> tuple[FieldViolation, ...]:
    bad = _detail(status, error_details_pb2.BadRequest())
    return (
        tuple(FieldViolation(v.field, v.description) for v in bad.field_violations) if bad else ()
    )


def _retry_s(status: status_pb2.Status) -> float:
    retry = _detail(status, error_details_pb2.RetryInfo())
    return retry.retry_delay.ToNanoseconds() / 1e9 if retry else 1.0
