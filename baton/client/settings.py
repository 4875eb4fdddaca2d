"""What a client is given once, and the rules for metadata, deadlines and retries that follow from
it. Pure."""

from __future__ import annotations

import math
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from baton.errors import BatonError, FieldViolation, InvalidRequest, RetriableError
from baton.redaction import redacted
from baton.rpc.status import REQUEST_ID_KEY, from_rpc_error

MetadataLike: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
Metadata: TypeAlias = tuple[tuple[str, str], ...]

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_RETRIES = 2
MAX_METADATA_BYTES = 8192
"""Servers may refuse more; each entry counts 32 bytes beside its text, as HTTP/2 counts it."""

MAX_TRACESTATE_CHARS = 512
"""Of a tracestate that is sent; a longer one stays here, where the trace goes on without it."""

_AUTHORIZATION = "authorization"
_ADDRESS = re.compile(r"(?:[^\s:/]+|\[[0-9a-fA-F:.%]+\]):[0-9]{1,5}")
_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_API_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's addresses, default timeout, metadata sent with every call, and retries."""

    addresses: tuple[str, ...]
    timeout_s: float
    #: May hold a key.
    metadata: Metadata = field(repr=False)
    max_retries: int

    @classmethod
    def of(
        cls,
        address: str,
        timeout_s: float,
        metadata: MetadataLike,
        max_retries: int,
        api_key: str | None = None,
    ) -> Settings:
        """Raises InvalidRequest for a value that cannot be used."""
        if max_retries < 0:
            raise _wrong("max_retries", f"{max_retries}: must be 0 or more")
        addresses = tuple(part.strip() for part in address.split(","))
        for part in addresses:
            if not (_ADDRESS.fullmatch(part) or part.startswith("unix:")):
                raise _wrong(
                    "address", f"{redacted(part)!a:.80}: must be host:port, e.g. {DEFAULT_ADDRESS}"
                )
        entries = (*checked_metadata(metadata), *_authorization(api_key))
        if [key for key, _ in entries].count(_AUTHORIZATION) > 1:
            raise _wrong(
                "api_key", "metadata has an authorization of its own; leave one of them out"
            )
        return cls(addresses, _timeout(timeout_s), entries, max_retries)

    @property
    def address(self) -> str:
        """As it was given."""
        return ",".join(self.addresses)

    def timeout_or(self, timeout_s: float | None) -> float:
        """A call's own timeout, or the client's. Raises InvalidRequest if it is not a positive
        number."""
        return self.timeout_s if timeout_s is None else _timeout(timeout_s)

    def call_metadata(self, request_id: str) -> Metadata:
        """What a call sends: the client's metadata, the request id, and the caller's trace unless
        the metadata name one.

        Raises InvalidRequest for a request id that no header can carry.
        """
        has_trace = any(key == "traceparent" for key, _ in self.metadata)
        trace = () if has_trace else _current_trace()
        return checked_metadata((*self.metadata, *trace, (REQUEST_ID_KEY, request_id)))

    def error_of(self, error: grpc.RpcError, request_id: str) -> BatonError:
        """The typed error of a failed call."""
        return from_rpc_error(error, address=self.address, request_id=request_id)


@dataclass(slots=True)
class Attempts:
    """How often a call may be tried again in a row, and until when on the caller's monotonic
    clock."""

    max_retries: int
    deadline_s: float
    num_failed: int = 0
    """In a row."""

    def remaining_s(self, now_s: float) -> float:
        """Time left for the call; never negative."""
        return max(0.0, self.deadline_s - now_s)

    def delay_s(self, error: BatonError, now_s: float) -> float | None:
        """How long to wait before the next attempt, which is then counted: as long as the server
        asks for, and twice as long with each in a row; None if there is to be none."""
        if not isinstance(error, RetriableError) or self.num_failed >= self.max_retries:
            return None
        delay_s = float((error.retry_after_s or 0.0) * 2**self.num_failed)
        if now_s + delay_s >= self.deadline_s:
            return None
        self.num_failed += 1
        return delay_s

    def on_progress(self) -> None:
        """Something of the answer came."""
        self.num_failed = 0


def new_request_id() -> str:
    """A request id that no one else has."""
    return uuid.uuid4().hex


def checked_metadata(metadata: MetadataLike) -> Metadata:
    """Raises InvalidRequest naming the entry that gRPC would refuse, or the size if it is too
    large."""
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
    entries = tuple((key, value) for key, value in pairs)
    for key, value in entries:
        name = f"metadata[{key!a:.80}]"
        if not _KEY.fullmatch(key) or key.startswith("grpc-") or key.endswith("-bin"):
            raise _wrong(name, "keys are of a-z, 0-9, '_', '-' and '.', not grpc-* and not *-bin")
        if not _VALUE.fullmatch(value):
            raise _wrong(name, f"{value!a:.80}: values are printable ASCII; encode others")
    num_bytes = sum(len(key) + len(value) + 32 for key, value in entries)
    if num_bytes > MAX_METADATA_BYTES:
        raise _wrong(
            "metadata",
            f"{num_bytes} bytes in {len(entries)} entries; "
            f"at most {MAX_METADATA_BYTES} are sent: send fewer or shorter entries",
        )
    return entries


def _current_trace() -> tuple[tuple[str, str], ...]:
    """The caller's trace, so that it goes on in the servers: W3C trace context of the current
    OpenTelemetry span; nothing outside of one."""
    if "opentelemetry.trace" not in sys.modules:
        # A span exists only where the program has imported OpenTelemetry, which this package does
        # without.
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(
        (key, value)
        for key, value in carrier.items()
        if key != "tracestate" or len(value) <= MAX_TRACESTATE_CHARS
    )


def _authorization(api_key: str | None) -> Metadata:
    if api_key is None:
        return ()
    if not _API_KEY.fullmatch(api_key):
        raise _wrong("api_key", "must be printable ASCII without spaces, and not empty")
    return ((_AUTHORIZATION, f"Bearer {api_key}"),)


def _timeout(timeout_s: float) -> float:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise _wrong("timeout_s", f"{timeout_s}: must be a positive, finite number of seconds")
    return float(timeout_s)


def _wrong(field: str, description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(field, description))
