"""HTTP/1.1 on one connection: reads whole requests within limits and deadlines, and answers them in
order.

httptools (llhttp) parses. Handlers get a request once its body is complete, and thus never wait for
the client's bytes. A request that is refused by its head is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools

from gateway.http.errors import HttpError, http_error
from gateway.http.json_body import Received
from gateway.http.read_turns import ReadTurns

Headers = Iterable[tuple[str, str]]

JSON = "application/json"

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one connection, except max_buffered_bytes.

    max_header_bytes: includes the request line. max_body_bytes: per request, and of all requests of
    a connection that wait for an answer to an earlier one. max_buffered_bytes: bodies of incomplete
    requests on all connections of a server. header_timeout_s: from a request's first byte to the
    end of its headers. body_timeout_s: from there to the end of the body. idle_timeout_s: between
    requests. linger_s: how long to read and discard input after a refusal, so that the client can
    read the answer.
    """

    max_header_bytes: int = 32 * 2**10
    max_headers: int = 100
    max_body_bytes: int = 16 * 2**20
    max_buffered_bytes: int = 256 * 2**20
    max_pipelined: int = 16
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    linger_s: float = 5.0
    write_timeout_s: float = 30.0


@dataclass(slots=True)
class HttpRequest:
    """One request. headers: names in lower case; repeated names in the order received."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    is_http_1_0: bool
    keeps_alive: bool
    body: Received = b""

    def header(self, name: str) -> str:
        """The first value of the header; empty if absent."""
        return next((value for key, value in self.headers if key == name), "")


class HttpHandler(Protocol):
    """The application behind the connections."""

    def refusal_of(self, request: HttpRequest) -> HttpError | None:
        """The reason to refuse the request by its head alone; None to accept it. Called first; may
        set the path that `handle` reads."""

    async def handle(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request. Cancelled when the client disconnects."""

    @property
    def background(self) -> Collection[asyncio.Task[None]]:
        """What goes on without a connection."""


@dataclass(slots=True, eq=False)
class HttpServerState:
    """State shared by a server's connections."""

    handler: HttpHandler
    limits: HttpLimits
    connections: set[HttpConnection] = field(default_factory=set)
    reads: ReadTurns = field(default_factory=ReadTurns)
    num_buffered_bytes: int = 0
    is_stopping: bool = False
    _date: str = ""
    _date_s: int = 0

    def date(self) -> str:
        """Value of the date header, formatted once per second."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s, self._date = now_s, formatdate(now_s, usegmt=True)
        return self._date


class _Phase(Enum):
    """What the connection waits for. Each phase except BUSY has a deadline."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    BUSY = auto()
    REFUSED = auto()


class HttpConnection(asyncio.Protocol):
    """One connection, with the callbacks of asyncio and the parser."""

    def __init__(self, state: HttpServerState) -> None:
        self._state = state
        self._limits = state.limits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._phase = _Phase.IDLE
        self._timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        """Bytes of the current request's head, or since its last byte of body, as of trailers."""
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._request: HttpRequest | None = None
        """The request being read, once its head is complete."""
        self._body = bytearray()
        """Grows as data arrives: joining 16 MB of pieces takes 15 ms."""
        self._is_reading = False
        """Whether a request has begun and not ended."""
        self._refusal: HttpError | None = None
        self._whole: deque[HttpRequest] = deque()
        """Complete requests that wait for the current one."""
        self.task: asyncio.Task[None] | None = None
        """Answers the current request."""
        self._writable: asyncio.Event | None = None
        """Cleared while the client reads slowly; created on first use."""
        self.lost = self._loop.create_future()
        """Done when the connection is closed and its state released."""

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not subclass asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)
        self._set_timer(self._limits.idle_timeout_s, self.abort)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._state.connections.discard(self)
        self._state.reads.leave(self)
        self.lost.set_result(None)
        self._drop_body()
        self._whole.clear()
        self._transport = None
        del self._parser  # which has this object's methods: see RequestDriver.run
        self._cancel_timer()
        self.resume_writing()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._phase is not _Phase.REFUSED and self._refusal is None:
            self._parse(data)
            if self._refusal is not None:
                self._drop_body()
            if self.task is None:
                self._next()
            if self._phase is _Phase.BUSY:
                self._limit_next()
        if self._is_reading or self._refusal is not None:
            self._state.reads.count(self, len(data))
        else:
            self._state.reads.leave(self)

    def _parse(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._refusal is None:
                self._parse_again(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            fault = f"this is not HTTP/1.1: {error}"
            self._refusal = self._refusal or http_error(HTTPStatus.BAD_REQUEST, fault)
        if self._refusal is None and self._is_reading:
            self._check_head(self._num_head_bytes)

    def _parse_again(self, rest: bytes) -> None:
        """Ignore the Upgrade header and reparse.

        Java's client asks for HTTP/2 this way, and the parser then stops after the head. Only
        HTTP/1.1 is served.
        """
        request = self._whole.pop()
        headers = [
            f"{name}: {value}\r\n"
            for name, value in request.headers
            if name not in ("upgrade", "connection", "http2-settings", "expect")
        ]
        head = f"{request.method} {self._url.decode('ascii')} HTTP/1.1\r\n{''.join(headers)}\r\n"
        self._parser = httptools.HttpRequestParser(self)
        self._parse(head.encode("latin-1") + rest)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> None:
        """Return None, which lets the transport close: the client has disconnected."""

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.Event()
        self._writable.clear()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._url, self._headers, self._request = b"", [], None
        self._is_reading = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request is not None:
            return  # a trailer: it comes after all checks, so it must not count as a header
        key = name.decode("latin-1").lower()
        self._headers.append((key, value.decode("latin-1")))
        # The parser refuses some of these itself, as malformed.
        if key == "transfer-encoding" and value.strip().lower() != b"chunked":
            fault = "transfer-encoding may only be chunked; send the body as it is"
            self._refusal = self._refusal or http_error(HTTPStatus.NOT_IMPLEMENTED, fault)

    def on_headers_complete(self) -> None:
        if self._refusal is not None:
            return
        num_bytes = len(self._url) + sum(len(n) + len(v) + 4 for n, v in self._headers)
        self._check_head(num_bytes)
        if self._refusal is not None:
            return
        try:
            url = httptools.parse_url(self._url)
            path, query = url.path.decode("ascii"), (url.query or b"").decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            self._refusal = http_error(HTTPStatus.BAD_REQUEST, "the URL is not one")
            return
        request = HttpRequest(
            self._parser.get_method().decode("ascii"),
            path,
            query,
            self._headers,
            self._parser.get_http_version() == "1.0",
            self._parser.should_keep_alive(),
        )
        self._request = request
        self._refusal = (
            _refusal_of_headers(request)
            or self._state.handler.refusal_of(request)
            or self._refusal_of_body(request)
        )
        if self._refusal is None and request.header("expect"):
            self._write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        self._num_head_bytes = 0
        if self._refusal is not None:
            return
        self._body += data
        self._state.num_buffered_bytes += len(data)
        limits = self._limits
        num_waiting_bytes = sum(len(request.body) for request in self._whole)
        if len(self._body) > limits.max_body_bytes:
            self._refusal = self._too_large()
        elif num_waiting_bytes + len(self._body) > limits.max_body_bytes:
            fault = f"more than {limits.max_body_bytes} bytes of requests at once on one connection"
            self._refusal = http_error(HTTPStatus.TOO_MANY_REQUESTS, fault)
        elif self._state.num_buffered_bytes > limits.max_buffered_bytes:
            self._refusal = http_error(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "too much of other requests is being received; try again",
                headers=(("retry-after", "1"),),
            )

    def on_message_complete(self) -> None:
        self._is_reading = False
        self._num_head_bytes = 0
        request, self._request = self._request, None
        if self._refusal is not None or request is None:
            return
        if len(self._whole) >= self._limits.max_pipelined:
            fault = f"more than {self._limits.max_pipelined} requests at once on one connection"
            self._refusal = http_error(HTTPStatus.TOO_MANY_REQUESTS, fault)
            return
        request.body = self._body
        self._drop_body()
        self._whole.append(request)

    def _check_head(self, num_bytes: int) -> None:
        limits = self._limits
        if num_bytes > limits.max_header_bytes or len(self._headers) > limits.max_headers:
            self._refusal = http_error(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"send at most {limits.max_headers} headers, of {limits.max_header_bytes} bytes "
                "in all",
            )

    def _refusal_of_body(self, request: HttpRequest) -> HttpError | None:
        length = request.header("content-length")
        if length and int(length) > self._limits.max_body_bytes:
            return self._too_large()
        if request.header("content-encoding") not in ("", "identity"):
            fault = "send the body as it is, without content-encoding"
            return http_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, fault)
        return None

    def _too_large(self) -> HttpError:
        limit = self._limits.max_body_bytes
        fault = f"the body has more than {limit} bytes; send less"
        return http_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, fault)

    def _drop_body(self) -> None:
        self._state.num_buffered_bytes -= len(self._body)
        self._body = bytearray()

    # Requests in order

    def _next(self) -> None:
        """Start the next request, or wait for it. A refusal follows the answers to all complete
        requests."""
        if self._whole:
            self._enter(_Phase.BUSY)
            self.task = self._loop.create_task(self._answer(self._whole.popleft()))
        elif self._refusal is not None:
            self._refuse(self._refusal)
        elif self._is_reading:
            self._enter(_Phase.HEAD if self._request is None else _Phase.BODY)
        elif self._phase is _Phase.BUSY:
            self._enter(_Phase.IDLE)

    async def _answer(self, request: HttpRequest) -> None:
        response = HttpResponse(self, request)
        try:
            await self._state.handler.handle(request, response)
        finally:
            self.task = None
            if self._transport is not None:
                self._go_on(response)

    def _go_on(self, response: HttpResponse) -> None:
        if not response.has_ended:
            self.abort()  # a truncated answer must not look complete
        elif response.keeps_alive and not self._state.is_stopping:
            self._next()
        else:
            self.close()

    def close(self) -> None:
        """Close after writing what is buffered, at most write_timeout_s later."""
        if self._transport is not None:
            self._phase = _Phase.REFUSED
            self._set_timer(self._limits.write_timeout_s, self.abort)
            self._transport.close()

    def stop(self) -> None:
        """Close if idle, because the server stops; a running request may finish."""
        if self.task is None:
            self.close()

    def abort(self) -> None:
        """Close now and discard unsent output."""
        if self._transport is not None:
            self._transport.abort()

    # Deadlines

    def _enter(self, phase: _Phase) -> None:
        """Enter a phase. Re-entering the same phase keeps its deadline, so slow input cannot extend
        it."""
        if phase is self._phase and self._timer is not None:
            return
        self._phase = phase
        limits = self._limits
        match phase:
            case _Phase.BUSY:
                self._cancel_timer()
            case _Phase.IDLE:
                self._set_timer(limits.idle_timeout_s, self.abort)
            case _Phase.HEAD:
                self._set_timer(limits.header_timeout_s, self._be_late)
            case _Phase.BODY:
                self._set_timer(limits.body_timeout_s, self._be_late)

    def _set_timer(self, delay_s: float, call: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(delay_s, call)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit_next(self) -> None:
        """Set the deadline of a request that arrives while an earlier one is answered."""
        if not self._is_reading or self._refusal is not None:
            self._cancel_timer()
        elif self._timer is None:
            self._set_timer(self._limits.body_timeout_s, self._be_late_behind)

    def _be_late_behind(self) -> None:
        """Refuse after the answers to earlier requests."""
        self._refusal = _late()
        self._drop_body()

    def _be_late(self) -> None:
        self._refuse(_late())

    def _refuse(self, error: HttpError) -> None:
        """Send a refusal and discard further input. No answer may be in progress."""
        self._drop_body()
        if self._transport is None:
            return
        self._phase = _Phase.REFUSED
        self._write(head_of(error.status, self._state.date(), error_headers(error)) + error.json)
        self._set_timer(self._limits.linger_s, self.abort)

    # Writing

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def write(self, data: bytes) -> Coroutine[Any, Any, object] | None:
        """Write `data`. Return None if the client's window took it, else an awaitable that
        completes when it has. Writes nothing after the client disconnected."""
        self._write(data)
        if self._writable is None or self._writable.is_set():
            return None
        return self._writable.wait()

    async def write_all(self, data: bytes) -> None:
        """As `write`, with a deadline of its own."""
        if (written := self.write(data)) is None:
            return
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await written
        except TimeoutError:
            self.abort()

    @property
    def date(self) -> str:
        return self._state.date()

    @property
    def is_stopping(self) -> bool:
        return self._state.is_stopping


class HttpResponse:
    """The answer to one request."""

    def __init__(self, connection: HttpConnection, request: HttpRequest) -> None:
        self._connection = connection
        self._request = request
        self._head = b""
        """Head of a stream until it is sent with the first bytes."""
        self._is_chunked = False
        self.headers: list[tuple[str, str]] = []
        """Headers of any answer, without content-type and content-length."""
        self.has_started = False
        self.has_ended = False
        self.keeps_alive = request.keeps_alive

    async def send(self, status: int, content_type: str, body: bytes) -> None:
        """Send a complete answer."""
        headers = [("content-type", content_type), ("content-length", str(len(body)))]
        head = self._make_head(status, headers)
        self.has_started = self.has_ended = True
        data = head if self._request.method == "HEAD" else head + body
        await self._connection.write_all(data)

    def start(self, content_type: str) -> None:
        """Begin a stream of unknown length."""
        headers = [
            ("content-type", content_type),
            ("cache-control", "no-cache"),
            ("x-accel-buffering", "no"),  # nginx otherwise buffers the whole answer
        ]
        self._is_chunked = not self._request.is_http_1_0
        if self._is_chunked:
            headers.append(("transfer-encoding", "chunked"))
        else:
            self.keeps_alive = False  # the end of the connection marks the end of the body
        self._head = self._make_head(HTTPStatus.OK, headers)
        self.has_started = True

    def write(self, data: bytes) -> Coroutine[Any, Any, object] | None:
        """Write the next bytes of a stream, at least one. Return None if the client's window took
        them, else an awaitable that completes when it has."""
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        return self._connection.write(data)

    async def end(self, data: bytes = b"") -> None:
        """End the stream, after `data` if given."""
        if self._is_chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        data, self._head = self._head + data, b""
        self.has_ended = True
        await self._connection.write_all(data)

    def _make_head(self, status: int, headers: list[tuple[str, str]]) -> bytes:
        if not self.keeps_alive or self._connection.is_stopping:
            self.keeps_alive = False
            headers.append(("connection", "close"))
        return head_of(status, self._connection.date, (*headers, *self.headers))


def _late() -> HttpError:
    return http_error(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive whole in time")


def _refusal_of_headers(request: HttpRequest) -> HttpError | None:
    """See RFC 9112, 3.2 (Host) and RFC 9110, 9.3.6 (CONNECT) and 10.1.1 (Expect)."""
    if request.method == "CONNECT":  # the parser takes it for an upgrade
        fault = "CONNECT: there are no tunnels here; send another method"
        return http_error(HTTPStatus.NOT_IMPLEMENTED, fault)
    num_hosts = sum(name == "host" for name, _ in request.headers)
    if num_hosts > 1 or not (num_hosts or request.is_http_1_0):
        return http_error(HTTPStatus.BAD_REQUEST, f"{num_hosts} host headers; send one")
    expected = request.header("expect")
    if expected.lower() not in ("", "100-continue"):
        fault = f"expect: {expected[:64]!r} cannot be met; send 100-continue, or leave it out"
        return http_error(HTTPStatus.EXPECTATION_FAILED, fault)
    return None


def head_of(status: int, date: str, headers: Headers) -> bytes:
    """Status line and headers. Header values come from the server and contain no line breaks."""
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, 'Unknown')}\r\ndate: {date}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers]
    lines.append("\r\n")
    return "".join(lines).encode("latin-1")


def error_headers(error: HttpError) -> Headers:
    """Headers of an answer that closes the connection."""
    return (
        ("content-type", JSON),
        ("content-length", str(len(error.json))),
        ("connection", "close"),
        *error.headers,
    )
