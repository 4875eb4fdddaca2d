"""Errors keep their meaning through a status, whatever their texts are, and statuses fit into
gRPC's metadata."""

from __future__ import annotations

import urllib.parse

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import (
    BY_REASON,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    RetriableError,
    WorkerLost,
)
from baton.rpc.status import (
    DETAILS_KEY,
    MAX_MESSAGE_BYTES,
    clip,
    from_rpc_error,
    to_proto,
    to_status,
)

LEAVES = st.sampled_from(sorted(BY_REASON.values(), key=lambda leaf: leaf.reason))
# Surrogates included: an error's text may quote what could not be sent.
TEXTS = st.text(st.characters(), max_size=40)
KEYS = st.from_regex(r"[a-z][a-z_]{2,20}", fullmatch=True).filter(lambda k: k != "request_id")


def travelled(error: BatonError, **where: str) -> BatonError:
    """The error as the other side sees it."""
    status = to_status(error)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return from_rpc_error(
        grpc.aio.AioRpcError(status.code, trailing_metadata=trailing, details=status.details),
        **where,
    )


def transport_error(code: grpc.StatusCode, text: str) -> BatonError:
    return from_rpc_error(
        grpc.aio.AioRpcError(code, details=text), address="1.2.3.4:5", request_id="r-1"
    )


def utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@given(
    LEAVES,
    TEXTS,
    st.dictionaries(KEYS, TEXTS, max_size=4),
    st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True),
    st.floats(0, 1e6),
)
def test_an_error_arrives_as_it_was_raised(
    leaf: type[BatonError],
    message: str,
    metadata: dict[str, str],
    request_id: str,
    retry_after_s: float,
) -> None:
    error = leaf(message, request_id=request_id)
    error.metadata = metadata
    if isinstance(error, RetriableError):
        error.retry_after_s = retry_after_s
    seen = travelled(error)
    assert type(seen) is leaf
    assert (seen.message, seen.request_id) == (utf8(message), request_id)
    assert dict(seen.metadata) == {key: utf8(value) for key, value in metadata.items()}
    assert seen.retry_after_s == (
        pytest.approx(retry_after_s, abs=1e-9) if isinstance(error, RetriableError) else None
    )


@given(st.lists(st.builds(FieldViolation, TEXTS, TEXTS), max_size=5))
def test_violations_arrive(violations: list[FieldViolation]) -> None:
    seen = travelled(InvalidRequest.of(*violations))
    assert isinstance(seen, InvalidRequest)
    assert seen.violations == tuple(
        FieldViolation(utf8(v.field), utf8(v.description)) for v in violations
    )


@given(
    st.sampled_from(["x", "ü", "🐍", "\n"]),
    st.integers(0, 20_000),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_a_status_fits_into_the_metadata_however_long_the_error_is(
    character: str, length: int, num_violations: int, num_entries: int
) -> None:
    long = character * length
    violations = tuple(FieldViolation(long, long) for _ in range(num_violations))
    error = InvalidRequest(long, violations=violations, request_id="r" * length)
    error.metadata = {f"key{i}": long for i in range(num_entries)}
    status = to_status(error)
    ((key, details),) = status.trailing_metadata
    base64_bytes = len(details) * 4 // 3 + 4
    message_bytes = len(urllib.parse.quote(status.details, safe=""))
    assert base64_bytes + message_bytes + len(key) + 300 < 8192
    seen = travelled(error)
    assert isinstance(seen, InvalidRequest)
    assert bool(seen.violations) == bool(violations)


def test_the_details_are_the_standard_ones() -> None:
    status = to_proto(Overloaded("full", retry_after_s=2.5, request_id="r-1", queue="8"))
    info, retry, request = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.RequestInfo(),
    )
    assert [d.Unpack(into) for d, into in zip(status.details, (info, retry, request), strict=True)]
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "OVERLOADED",
        "baton",
        {"request_id": "r-1", "queue": "8"},
    )
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 500_000_000)
    assert request.request_id == "r-1"


@given(st.text(st.characters(), max_size=60), st.integers(3, 100))
def test_clip_cuts_between_characters(text: str, max_bytes: int) -> None:
    cut = clip(text, max_bytes)
    assert len(cut.encode()) <= max_bytes
    assert cut == utf8(text) or (cut.endswith("…") and utf8(text).startswith(cut[:-1]))


@pytest.mark.parametrize(
    ("code", "text", "kind", "says"),
    [
        (
            "UNAVAILABLE",
            "failed to connect to all addresses",
            NoWorkers,
            "gateway not reachable at 1.2.3.4:5",
        ),
        ("UNAVAILABLE", "errors resolving host", NoWorkers, "gateway not reachable at 1.2.3.4:5"),
        ("UNAVAILABLE", "Socket closed", WorkerLost, "1.2.3.4:5 was lost"),
        ("UNAVAILABLE", "ping timeout", WorkerLost, "1.2.3.4:5 was lost"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded, "timeout_s"),
        ("CANCELLED", "Locally cancelled", Cancelled, "Locally cancelled"),
        ("CANCELLED", "Received RST_STREAM with error code 8", WorkerLost, "was lost"),
        (
            "RESOURCE_EXHAUSTED",
            "received metadata size exceeds hard limit",
            InvalidRequest,
            "metadata",
        ),
        (
            "RESOURCE_EXHAUSTED",
            "CLIENT: Sent message larger than max (2 vs. 1)",
            InvalidRequest,
            "shorter prompt",
        ),
        (
            "RESOURCE_EXHAUSTED",
            "SERVER: Sent message larger than max",
            InvalidRequest,
            "ask for less",
        ),
        ("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!", Overloaded, "full"),
        ("UNIMPLEMENTED", "Method not found!", BatonError, "is it a Baton server?"),
        ("INTERNAL", "RST_STREAM", BatonError, "RST_STREAM"),
        ("DATA_LOSS", "", BatonError, "DATA_LOSS"),
    ],
)
def test_errors_of_the_transport_are_typed_too(
    code: str, text: str, kind: type[BatonError], says: str
) -> None:
    error = transport_error(grpc.StatusCode[code], text)
    assert type(error) is kind
    assert says in error.message
    assert error.request_id == "r-1"


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", DeadlineExceeded), ("RST_STREAM", DeadlineExceeded), ("Locally cancelled", Cancelled)],
)
def test_a_call_that_its_server_cancels_after_the_deadline_is_too_late(
    text: str, kind: type[BatonError]
) -> None:
    lost = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, details=text)
    assert type(from_rpc_error(lost, is_over=True)) is kind
    status = to_status(Overloaded("full"))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    rich = grpc.aio.AioRpcError(status.code, trailing_metadata=trailing, details="full")
    assert type(from_rpc_error(rich, is_over=True)) is Overloaded


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"", b"\x08\x03\x12\x01x"])
def test_details_that_cannot_be_read_are_ignored(raw: bytes) -> None:
    trailing = grpc.aio.Metadata((DETAILS_KEY, raw))
    error = from_rpc_error(
        grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, trailing_metadata=trailing, details="gone")
    )
    assert type(error) is WorkerLost
    assert "gone" in error.message


@pytest.mark.parametrize(
    ("details", "is_lost"), [("Internal error from Core", True), ("another fault", False)]
)
def test_an_internal_error_that_grpc_itself_makes_of_a_broken_connection_is_a_loss(
    details: str, *, is_lost: bool
) -> None:
    code, nothing = grpc.StatusCode.INTERNAL, grpc.aio.Metadata()
    error = from_rpc_error(grpc.aio.AioRpcError(code, nothing, nothing, details))
    assert (type(error) is WorkerLost) == is_lost


def test_an_entry_named_like_a_parameter_is_only_an_entry() -> None:
    error = Overloaded("full")
    error.metadata = {"message": "a", "retry_after_s": "b", "self": "c"}
    seen = travelled(error)
    assert (seen.message, dict(seen.metadata)) == ("full", dict(error.metadata))


def test_a_long_message_is_cut_where_it_counts() -> None:
    assert len(travelled(Overloaded("é" * 5000)).message.encode()) <= MAX_MESSAGE_BYTES
