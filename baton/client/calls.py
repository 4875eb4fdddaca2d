"""Calls of a client: settings, and the resulting metadata, deadlines and retries; connections; and
the calls of one stream, which resume on another gateway."""

from __future__ import annotations

import math
import re
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import grpc
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]

from baton.client.results import Chunk, Completion, chunk_of, completion_of
from baton.errors import BatonError, Cancelled, FieldViolation, InvalidRequest, RetriableError
from baton.redaction import redacted
from baton.rpc.channel import MAX_CONCURRENT_STREAMS
from baton.rpc.status import REQUEST_ID_KEY, from_rpc_error
from baton.rpc.tls import TlsFiles
from baton.v1 import inference_pb2, inference_pb2_grpc

MetadataLike: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
Metadata: TypeAlias = tuple[tuple[str, str], ...]

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
MAX_AT_ONCE = 64
"""Maximum concurrent requests of generate_all."""
DEFAULT_MAX_RETRIES = 2
MIN_RESUMPTIONS = 5
"""Minimum consecutive retries of a stream that has received pieces, unless retries are disabled: 31
s, enough to restart a gateway without losing the work done."""
MAX_METADATA_BYTES = 8192
"""Servers may refuse more. Each entry counts 32 bytes in addition to its text, as in HTTP/2."""

MAX_TRACESTATE_CHARS = 512
"""Longer tracestates are not sent; the trace continues without."""

#: Seconds before a call's deadline within which a server's gRPC may cancel the call for it.
_CLOCK_SKEW_S = 0.05

_AUTHORIZATION = "authorization"
_ADDRESS = re.compile(r"(?:[^\s:/]+|\[[0-9a-fA-F:.%]+\]):[0-9]{1,5}")
_URL = re.compile(r"(?i:(https?)://)(.*?)/?")
_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_API_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's addresses, default timeout, metadata of every call, and retries. tls: None for
    plain text."""

    addresses: tuple[str, ...]
    tls: TlsFiles | None
    timeout_s: float
    #: May contain an API key.
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
        tls: TlsFiles | None = None,
    ) -> Settings:
        """address: see Client. Raises InvalidRequest for an invalid value."""
        if max_retries < 0:
            raise _wrong("max_retries", f"{max_retries}: must be 0 or more")
        given = tuple(part.strip() for part in address.split(","))
        urls = [_URL.fullmatch(part) for part in given]
        schemes = {url[1].lower() if url else "" for url in urls}
        addresses = tuple(url[2] if url else part for url, part in zip(urls, given, strict=True))
        for part, bare in zip(given, addresses, strict=True):
            if not (_ADDRESS.fullmatch(bare) or part.startswith("unix:")):
                raise _wrong(
                    "address",
                    f"{redacted(part)!a:.80}: must be host:port, e.g. {DEFAULT_ADDRESS}, or that "
                    "as a URL",
                )
        if len(schemes) > 1:
            raise _wrong("address", "some are https and some are not; write all in one way")
        if tls is not None and "http" in schemes:
            raise _wrong("address", "http is plain text; leave out tls, or write https")
        if tls is None and "https" in schemes:
            tls = TlsFiles()
        entries = (*checked_metadata(metadata), *_authorization(api_key))
        if [key for key, _ in entries].count(_AUTHORIZATION) > 1:
            raise _wrong(
                "api_key", "metadata has an authorization of its own; leave one of them out"
            )
        return cls(addresses, tls, _timeout(timeout_s), entries, max_retries)

    @property
    def address(self) -> str:
        """Gateways: host:port, separated by commas."""
        return ",".join(self.addresses)

    def attempts(self, timeout_s: float | None) -> Attempts:
        """Attempts of a call that begins now. timeout_s: the call's own; None for the client's.
        Raises InvalidRequest if it is not a positive number."""
        timeout_s = self.timeout_s if timeout_s is None else _timeout(timeout_s)
        return Attempts(self.max_retries, time.monotonic() + timeout_s)

    def call_metadata(self, request_id: str) -> Metadata:
        """Metadata of a call: the client's, the request id, and the W3C trace context of the
        current OpenTelemetry span, unless the metadata contain one.

        Raises InvalidRequest for a request id that a header cannot contain.
        """
        trace: dict[str, str] = {}
        # A span exists only if the program has imported OpenTelemetry, which this package does not
        # depend on.
        if "opentelemetry.trace" in sys.modules and "traceparent" not in dict(self.metadata):
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            TraceContextTextMapPropagator().inject(trace)
            if len(trace.get("tracestate", "")) > MAX_TRACESTATE_CHARS:
                del trace["tracestate"]
        return checked_metadata((*self.metadata, *trace.items(), (REQUEST_ID_KEY, request_id)))

    def error_of(self, error: grpc.RpcError, request_id: str, attempts: Attempts) -> BatonError:
        """The typed error of a failed call. attempts: of the call."""
        is_over = attempts.remaining_s(time.monotonic()) <= _CLOCK_SKEW_S
        return from_rpc_error(error, address=self.address, request_id=request_id, is_over=is_over)


@dataclass(slots=True)
class Attempts:
    """Remaining retries of a call, and its deadline on the caller's monotonic clock."""

    max_retries: int
    deadline_s: float
    num_failed: int = 0
    """Consecutive failures."""

    def remaining_s(self, now_s: float) -> float:
        """Seconds left for the call; never negative."""
        return max(0.0, self.deadline_s - now_s)

    def delay_s(
        self, error: BatonError, now_s: float, *, is_resumption: bool = False
    ) -> float | None:
        """Count an attempt, and return the delay before it in seconds: the server's retry time,
        doubled for each consecutive retry; None to give up. is_resumption: of a stream that has
        received pieces."""
        most = self.max_retries
        if most and is_resumption:
            most = max(most, MIN_RESUMPTIONS)
        if not isinstance(error, RetriableError) or self.num_failed >= most:
            return None
        delay_s = float((error.retry_after_s or 0.0) * 2**self.num_failed)
        if now_s + delay_s >= self.deadline_s:
            return None
        self.num_failed += 1
        return delay_s


class Channel(Protocol):
    """grpc.aio.Channel, or an object with the same methods."""

    async def close(self) -> None: ...


class Connection:
    """A channel and the stubs of its services."""

    def __init__(self, channel: Channel, address: str) -> None:
        self.channel = channel
        self.address = address
        either: Any = channel  # the stubs have one class for all channels
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(either)
        self.health: Any = health_pb2_grpc.HealthStub(either)
        self.num_calls = 0
        """Calls in progress."""


class Connections:
    """Thread-safe connection pool. A server runs MAX_CONCURRENT_STREAMS calls per connection; grpc
    would queue further calls silently while their deadlines run."""

    def __init__(self, connect: Callable[[str], Channel], addresses: Sequence[str]) -> None:
        """connect: creates a channel to an address; the caller closes it. addresses: of
        interchangeable gateways; each is used until it fails."""
        self._connect = connect
        self._addresses = addresses
        self._place = 0
        """Index of the current address."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: list[Connection] = []

    def take(self) -> Connection:
        """Take a connection for one call, to be returned with `give_back`. Raises Cancelled once
        closed."""
        with self._lock:
            if self._is_closed:
                raise Cancelled("this client is closed; make a new one")
            address = self._addresses[self._place]
            there = (c for c in self._connections if c.address == address)
            free = (c for c in there if c.num_calls < MAX_CONCURRENT_STREAMS)
            connection = next(free, None)
            if connection is None:
                connection = Connection(self._connect(address), address)
                self._connections.append(connection)
            connection.num_calls += 1
            return connection

    def avoid(self, connection: Connection) -> None:
        """Switch to the next address after a retriable failure, unless another call has done so."""
        with self._lock:
            if connection.address == self._addresses[self._place]:
                self._place = (self._place + 1) % len(self._addresses)

    def give_back(self, connection: Connection) -> None:
        """Return a connection after a call."""
        with self._lock:
            connection.num_calls -= 1

    def close(self) -> list[Channel]:
        """Refuse further calls. Returns all channels, for the caller to close."""
        with self._lock:
            self._is_closed = True
            return [connection.channel for connection in self._connections]


class GenerateCalls:
    """Calls of one stream: the first, and those that resume after it. Checks that pieces are
    contiguous, and that each choice ends."""

    def __init__(
        self,
        connections: Connections,
        settings: Settings,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        timeout_s: float | None,
    ) -> None:
        """request_id: random if empty. timeout_s: for all calls together; None for the client's."""
        self._attempts = settings.attempts(timeout_s)
        self.request_id = request_id or uuid.uuid4().hex
        """The server's request id once the first piece has arrived; before, the proposed one."""
        self.has_ended = False
        """Whether the server has ended the stream and all choices."""
        self.is_whole = False
        """Whether all pieces arrived."""
        self._connections = connections
        self._settings = settings
        self._request = request
        self._metadata = settings.call_metadata(self.request_id)
        self._last: Connection | None = None
        self._choices: dict[int, inference_pb2.ChoiceSoFar] = {}
        sampling = request.sampling
        # If all choices are returned, none is held back.
        is_best_of = sampling.HasField("best_of") and sampling.best_of != max(1, sampling.n)
        is_beam_search = sampling.HasField("beam_search")
        self._comes_at_end = is_best_of or is_beam_search
        """Whether each choice is one piece, sent after all have ended: a resumed call computes all
        again, and repeated choices are dropped here."""
        self._repeated: set[int] = set()
        """Choices received before, which this call will repeat."""
        if not (is_beam_search or sampling.HasField("seed")):
            # Drawn here, so that every gateway generates the same tokens.
            sampling.seed = secrets.randbits(64)

    def open(self) -> Any:
        """Open a Generate call, to be cancelled or read to its end. Raises Cancelled once the
        client is closed."""
        if self._last is not None:
            self._connections.avoid(self._last)
        connection = self._last = self._connections.take()
        # The output received per choice: see GenerateRequest.resume_from.
        if self._comes_at_end:
            self._repeated = set(self._choices)
        else:
            so_far = (c for c in self._choices.values() if c.token_ids or c.has_ended)
            del self._request.resume_from[:]
            self._request.resume_from.extend(so_far)
        call = connection.inference.Generate(
            self._request,
            timeout=self._attempts.remaining_s(time.monotonic()),
            metadata=self._metadata,
        )
        call.add_done_callback(lambda _: self._connections.give_back(connection))
        return call

    def accept(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """Accept a piece. Returns None for a repeated one. Raises BatonError if it is not
        contiguous or differs from the piece it repeats."""
        chunk = chunk_of(response)
        self.request_id = chunk.request_id or self.request_id
        choice = self._choices.get(chunk.choice)
        if choice is not None and chunk.choice in self._repeated:
            self._repeated.remove(chunk.choice)
            if tuple(choice.token_ids) != chunk.token_ids:
                raise self._broken(f"broke off, and choice {chunk.choice} is another one now")
            return None
        self._attempts.num_failed = 0
        if choice is None:
            choice = self._choices[chunk.choice] = inference_pb2.ChoiceSoFar(choice=chunk.choice)
        expected = len(choice.token_ids)
        if chunk.token_index != expected:
            raise self._broken(f"jumped from token {expected} to {chunk.token_index}")
        if choice.has_ended:
            raise self._broken("went on after its end")
        choice.token_ids.extend(chunk.token_ids)
        choice.num_chars += len(chunk.text)
        choice.has_ended = chunk.finish_reason is not None
        self.is_whole = chunk.usage is not None
        return chunk

    def end(self) -> None:
        """Record the end of the stream. Raises BatonError if some choice has not ended."""
        if not self._choices or not all(choice.has_ended for choice in self._choices.values()):
            raise self._broken("ended without a last piece")
        self.has_ended = True

    def completion(self, chunks: Iterable[Chunk]) -> Completion:
        """Join what was read of an ended stream. Raises Cancelled if it was closed first."""
        self.check_whole("stream")
        return completion_of(self.request_id, chunks)

    def check_whole(self, closed: Literal["stream", "client"]) -> None:
        """Raises Cancelled if the closed stream lacks pieces."""
        if not (self.is_whole or self.has_ended):
            message = f"the {closed} was closed before the answer's end"
            raise Cancelled(message, request_id=self.request_id)

    def error_of(self, error: grpc.RpcError) -> BatonError:
        """The typed error of a failed call."""
        return self._settings.error_of(error, self.request_id, self._attempts)

    def retry_delay_s(self, error: BatonError) -> float | None:
        """Seconds before the next call; None to give up."""
        is_in_pieces = not all(choice.has_ended for choice in self._choices.values())
        if self._comes_at_end and is_in_pieces:
            return None
        is_resumption = bool(self._choices)
        return self._attempts.delay_s(error, time.monotonic(), is_resumption=is_resumption)

    def _broken(self, how: str) -> BatonError:
        return BatonError(f"the stream {how}", request_id=self.request_id)


def checked_metadata(metadata: MetadataLike) -> Metadata:
    """Raises InvalidRequest naming an entry that gRPC would refuse, or the size if too large."""
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
