"""One HTTP connection without a network: bytes in, bytes out, under a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.connection import (
    HttpConnection,
    HttpLimits,
    HttpRequest,
    HttpResponse,
    HttpServerState,
)
from gateway.http.errors import HttpError, http_error
from gateway.http.server import Acceptor, HttpServer
from tests.support.virtual_loop import run_virtual

LIMITS = HttpLimits(
    max_header_bytes=500, max_headers=8, max_body_bytes=1000, max_buffered_bytes=1500
)


class Wire(asyncio.Transport):
    """What the connection writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.connection: HttpConnection | None = None
        self.is_open = True
        self.was_aborted = False
        self.is_read = True

    def write(self, data: Any) -> None:
        if self.is_open:
            self.sent += bytes(data)

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return not self.is_open

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            asyncio.get_running_loop().call_soon(self.lose)

    def abort(self) -> None:
        self.was_aborted = True
        self.close()

    def lose(self) -> None:
        assert self.connection
        self.connection.connection_lost(None)

    @property
    def statuses(self) -> list[int]:
        return [int(line.split()[0]) for line in self.sent.decode().split("HTTP/1.1 ")[1:]]

    @property
    def error(self) -> str:
        return str(json.loads(self.sent.partition(b"\r\n\r\n")[2])["error"]["message"])


class Handler:
    """Answers each request with its path and body, or as `answer` does."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.answer: Callable[[HttpResponse], Awaitable[None]] | None = None
        self.num_cancelled = 0
        self.background: list[asyncio.Task[None]] = []

    def refusal_of(self, request: HttpRequest) -> HttpError | None:
        return http_error(401, "no key") if request.path == "/secret" else None

    async def handle(self, request: HttpRequest, response: HttpResponse) -> None:
        self.seen.append((request.method, request.path, request.body))
        try:
            if self.answer:
                await self.answer(response)
            else:
                await response.send(200, "text/plain", request.path.encode() + request.body)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class World:
    """A server's state, and connections to it."""

    def __init__(self) -> None:
        self.handler = Handler()
        self.state = HttpServerState(self.handler, LIMITS)

    def connect(self) -> tuple[HttpConnection, Wire]:
        wire, connection = Wire(), HttpConnection(self.state)
        wire.connection = connection
        connection.connection_made(wire)
        return connection, wire

    async def exchange(self, *pieces: bytes) -> Wire:
        connection, wire = self.connect()
        for piece in pieces:
            if wire.is_open:
                connection.data_received(piece)
            await asyncio.sleep(0)
        await settle()
        return wire


def hold_answers(world: World) -> asyncio.Event:
    """Answers wait until it is set."""
    ended = asyncio.Event()

    async def answer(response: HttpResponse) -> None:
        await ended.wait()
        await response.send(200, "text/plain", b"")

    world.handler.answer = answer
    return ended


async def settle() -> None:
    await asyncio.sleep(1e-6)


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        await test(world)
        for connection in tuple(world.state.connections):
            connection.connection_lost(None)
        await settle()
        assert world.state.num_buffered_bytes == 0
        assert not world.state.connections

    run_virtual(main())


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


THREE = post("/a", b"x" * 50) + post("/b", b"") + b"GET /c?d=1 HTTP/1.1\r\nHost: x\r\n\r\n"


@given(st.lists(st.integers(1, len(THREE) - 1), max_size=8))
@settings(max_examples=60)
def test_bytes_may_come_in_any_pieces(cuts: list[int]) -> None:
    async def test(world: World) -> None:
        edges = [0, *sorted(cuts), len(THREE)]
        wire = await world.exchange(*(THREE[a:b] for a, b in itertools.pairwise(edges) if a < b))
        assert world.handler.seen == [
            ("POST", "/a", b"x" * 50),
            ("POST", "/b", b""),
            ("GET", "/c", b""),
        ]
        assert wire.statuses == [200, 200, 200]
        assert wire.is_open

    run(test)


def test_requests_sent_ahead_are_answered_in_order() -> None:
    async def test(world: World) -> None:
        async def answer(response: HttpResponse) -> None:
            _, path, _ = world.handler.seen[-1]
            await asyncio.sleep(3.0 if path == "/a" else 0.0)
            await response.send(200, "text/plain", path.encode())

        world.handler.answer = answer
        connection, wire = world.connect()
        connection.data_received(THREE)
        await asyncio.sleep(5.0)
        assert [wire.sent.index(path) for path in (b"/a", b"/b", b"/c")] == sorted(
            wire.sent.index(path) for path in (b"/a", b"/b", b"/c")
        )

    run(test)


@given(st.integers(1, 8), st.integers(0, 1))
def test_a_refusal_follows_the_answers_to_complete_requests(num_whole: int, is_slow: int) -> None:
    async def test(world: World) -> None:
        async def answer(response: HttpResponse) -> None:
            await asyncio.sleep(is_slow)
            await response.send(200, "text/plain", b"ok")

        world.handler.answer = answer
        _, wire = world.connect()
        assert wire.connection
        wire.connection.data_received(post("/", b"a") * num_whole + b"no such thing\r\n\r\n")
        wire.connection.data_received(post("/late", b""))
        await asyncio.sleep(num_whole + LIMITS.linger_s + 1)
        assert wire.statuses == [200] * num_whole + [400]
        assert len(world.handler.seen) == num_whole

    run(test)


UPGRADE = b"GET /up HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (UPGRADE.replace(b"/up", b"/secret"), [401]),
        (UPGRADE + b"no such thing\r\n\r\n", [200, 400]),
        (b"CONNECT /a HTTP/1.1\r\nhost: x\r\n\r\n", [501]),
        (UPGRADE * 40, [200] * (LIMITS.max_pipelined - 2) + [429]),
    ],
)
def test_upgrades_are_refused_once_and_after_earlier_requests(
    sent: bytes, statuses: list[int]
) -> None:
    async def test(world: World) -> None:
        earlier = post("/a", b"a") + post("/b", b"b")
        wire = await world.exchange(earlier + sent)
        await asyncio.sleep(1)
        assert wire.statuses == [200, 200, *statuses]
        assert [path for _, path, _ in world.handler.seen[:2]] == ["/a", "/b"]

    run(test)


def test_of_too_many_requests_the_first_are_answered() -> None:
    async def test(world: World) -> None:
        wire = await world.exchange(post("/", b"a") * 20)
        await asyncio.sleep(1)
        assert wire.statuses == [200] * LIMITS.max_pipelined + [429]

    run(test)


def test_bodies_that_wait_for_an_answer_are_limited_in_all() -> None:
    """Else one connection could hold many times the limit for as long as an answer takes."""

    async def test(world: World) -> None:
        ended = hold_answers(world)
        connection, wire = world.connect()
        for body in (b"a" * 1000, b"b" * 600, b"c" * 400, b"d"):
            connection.data_received(post("/", body))
            await settle()
        ended.set()
        await settle()
        assert wire.statuses == [200, 200, 200, 429]

    run(test)


def test_old_clients_need_no_host() -> None:
    async def test(world: World) -> None:
        wire = await world.exchange(b"GET / HTTP/1.0\r\n\r\n")
        assert wire.statuses == [200]

    run(test)


#: A request up to its trailers.
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"


def test_trailers_are_no_headers() -> None:
    async def test(world: World) -> None:
        heads: list[list[tuple[str, str]]] = []

        async def handle(request: HttpRequest, response: HttpResponse) -> None:
            heads.append(request.headers)
            await response.send(200, "text/plain", bytes(request.body))

        world.handler.handle = handle  # type: ignore[method-assign]
        wire = await world.exchange(CHUNKED + b"x-request-id: 7\r\n\r\n" + post("/", b"y"))
        assert wire.statuses == [200, 200]
        assert not any(name == "x-request-id" for head in heads for name, _ in head)

    run(test)


@pytest.mark.parametrize(
    ("pieces", "status", "said"),
    [
        ((b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20 + b"\r\n",), 431, "headers"),
        ((b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 600 + b"\r\n\r\n",), 431, "500 bytes"),
        ((b"GET / HTTP/1.1\r\nhost: x\r\na: ", *(b"b" * 100 for _ in range(9))), 431, "500 bytes"),
        ((b"GET /" + b"x" * 700,), 431, "500 bytes"),
        ((b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n",), 413, "1000 bytes"),
        (
            (
                b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
                *(b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(11)),
            ),
            413,
            "1000 bytes",
        ),
        ((CHUNKED, *(b"t%d: v\r\n" % i for i in range(90))), 431, "500 bytes"),
        ((CHUNKED, b"t: ", *(b"v" * 100 for _ in range(9))), 431, "500 bytes"),
        ((CHUNKED[:-3], b"1;", *(b"v" * 100 for _ in range(9))), 431, "500 bytes"),
        ((b"no such thing\r\n\r\n",), 400, "HTTP/1.1"),
        ((b"GET / HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n",), 400, "HTTP/1.1"),
        ((b"\x16\x03\x01\x02\x00\x01",), 400, "HTTP/1.1"),
        ((b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",), 400, "HTTP/1.1"),
        ((post("/", b"abc", "content-encoding: gzip"),), 415, "content-encoding"),
        ((b"GET / HTTP/1.1\r\na: b\r\n\r\n",), 400, "0 host headers"),
        ((post("/", b"", "host: y"),), 400, "2 host headers"),
        ((post("/", b"", "expect: 200-ok"),), 417, "200-ok"),
        ((b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",), 501, "chunked"),
        (
            (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n",),
            501,
            "chunked",
        ),
        ((post("/secret", b"x" * 900)[:200],), 401, "no key"),
    ],
)
def test_what_is_refused_reaches_no_handler(
    pieces: tuple[bytes, ...], status: int, said: str
) -> None:
    """Answered once; what still comes is thrown away, and the connection is closed soon."""

    async def test(world: World) -> None:
        connection, wire = world.connect()
        for piece in pieces:
            connection.data_received(piece)
        connection.data_received(b"x" * 100)
        await settle()
        assert wire.statuses == [status]
        assert said in wire.error
        assert b"connection: close" in wire.sent
        assert not world.handler.seen
        await asyncio.sleep(LIMITS.linger_s + 1)
        assert not wire.is_open

    run(test)


def test_bytes_that_trickle_do_not_move_the_deadline() -> None:
    """A slow loris, of headers and of a body."""

    async def trickle(world: World, start: bytes, byte: bytes, within_s: float) -> Wire:
        connection, wire = world.connect()
        connection.data_received(start)
        begin_s = asyncio.get_running_loop().time()
        while not wire.sent:
            await asyncio.sleep(1.0)
            connection.data_received(byte)
        assert asyncio.get_running_loop().time() - begin_s <= within_s + 1
        return wire

    async def test(world: World) -> None:
        head = await trickle(
            world, b"GET / HTTP/1.1\r\nhost: x\r\na: ", b"b", LIMITS.header_timeout_s
        )
        body = await trickle(
            world,
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n",
            b"b",
            LIMITS.body_timeout_s,
        )
        assert head.statuses == body.statuses == [408]
        assert not world.handler.seen

    run(test)


def test_a_body_behind_a_running_answer_has_a_deadline() -> None:
    """It is refused after that answer; one that comes whole meanwhile is answered, however late."""

    async def test(world: World) -> None:
        ended = hold_answers(world)
        slow, slow_wire = world.connect()
        whole, whole_wire = world.connect()
        for connection in (slow, whole):
            connection.data_received(post("/", b"") + post("/", b"x" * 9)[:-1])
        await asyncio.sleep(LIMITS.body_timeout_s / 2)
        whole.data_received(b"x")
        await asyncio.sleep(LIMITS.body_timeout_s)
        assert world.state.num_buffered_bytes == 0, "nothing of the late one is held"
        slow.data_received(b"x")
        ended.set()
        await settle()
        assert slow_wire.statuses == [200, 408]
        assert whole_wire.statuses == [200, 200]

    run(test)


def test_a_connection_that_says_nothing_is_closed() -> None:
    async def test(world: World) -> None:
        _, wire = world.connect()
        await asyncio.sleep(LIMITS.idle_timeout_s + 1)
        assert wire.was_aborted
        assert wire.sent == b""

    run(test)


def test_bodies_of_all_connections_together_have_a_limit() -> None:
    async def test(world: World) -> None:
        wires = []
        for _ in range(3):
            connection, wire = world.connect()
            connection.data_received(post("/", b"x" * 900)[:-1])
            wires.append(wire)
        assert [wire.statuses for wire in wires] == [[], [503], [503]]
        assert b"retry-after" in wires[1].sent

    run(test)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def test(world: World) -> None:
        world.handler.answer = lambda _: asyncio.get_running_loop().create_future()
        connection, _ = world.connect()
        connection.data_received(post("/", b""))
        await settle()
        connection.connection_lost(None)
        await settle()
        assert world.handler.num_cancelled == 1

    run(test)


def test_a_slow_reader_holds_up_its_own_stream() -> None:
    async def test(world: World) -> None:
        written: list[int] = []

        async def answer(response: HttpResponse) -> None:
            response.start("text/plain")
            for number in range(4):
                taken = response.write(b"%d" % number)
                if taken is not None:
                    await taken
                written.append(number)
            await response.end()

        world.handler.answer = answer
        connection, wire = world.connect()
        connection.data_received(post("/", b""))
        connection.pause_writing()
        await settle()
        assert written == []
        connection.resume_writing()
        await settle()
        assert written == [0, 1, 2, 3]
        assert wire.sent.endswith(b"1\r\n0\r\n1\r\n1\r\n1\r\n2\r\n1\r\n3\r\n0\r\n\r\n")

    run(test)


def test_who_never_reads_an_answer_is_cut_off() -> None:
    async def test(world: World) -> None:
        connection, wire = world.connect()
        connection.pause_writing()
        connection.data_received(post("/", b""))
        await asyncio.sleep(LIMITS.write_timeout_s + 1)
        assert wire.was_aborted

    run(test)


def test_half_an_answer_is_cut_off() -> None:
    """It must not look like a whole one."""

    async def test(world: World) -> None:
        async def answer(response: HttpResponse) -> None:
            response.start("text/plain")
            assert response.write(b"half") is None

        world.handler.answer = answer
        wire = await world.exchange(post("/", b""))
        assert wire.was_aborted
        assert not wire.sent.endswith(b"0\r\n\r\n")

    run(test)


def test_streams_to_old_clients_end_with_the_connection() -> None:
    async def test(world: World) -> None:
        async def answer(response: HttpResponse) -> None:
            response.start("text/plain")
            assert response.write(b"one") is None
            await response.end(b"two")

        world.handler.answer = answer
        wire = await world.exchange(b"GET / HTTP/1.0\r\n\r\n")
        assert wire.sent.endswith(b"\r\n\r\nonetwo")
        assert b"chunked" not in wire.sent
        assert not wire.is_open

    run(test)


def test_head_gets_no_body() -> None:
    async def test(world: World) -> None:
        wire = await world.exchange(b"HEAD /abc HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"content-length: 4" in wire.sent
        assert wire.sent.endswith(b"\r\n\r\n")
        assert wire.is_open

    run(test)


def test_who_asks_may_go_on() -> None:
    async def test(world: World) -> None:
        head, _, body = post("/", b"hello", "expect: 100-continue").partition(b"\r\n\r\n")
        connection, wire = world.connect()
        connection.data_received(head + b"\r\n\r\n")
        assert wire.statuses == [100]
        connection.data_received(body)
        await settle()
        assert wire.statuses == [100, 200]

    run(test)


@given(st.integers(1, 120))
@settings(max_examples=30)
def test_an_upgrade_is_passed_over(cut: int) -> None:
    """Java's client asks for HTTP/2 so, with a body."""

    async def test(world: World) -> None:
        upgrade = post("/a?b", b"body", "connection: upgrade, http2-settings", "upgrade: h2c")
        wire = await world.exchange(upgrade[:cut], upgrade[cut:], post("/", b"next"))
        assert world.handler.seen == [("POST", "/a", b"body"), ("POST", "/", b"next")]
        assert wire.statuses == [200, 200]

    run(test)


def test_a_server_that_stops_lets_answers_end() -> None:
    async def test(world: World) -> None:
        async def answer(response: HttpResponse) -> None:
            await asyncio.sleep(2.0)
            await response.send(200, "text/plain", b"done")

        world.handler.answer = answer
        _, idle = world.connect()
        connection, busy = world.connect()
        connection.data_received(post("/", b""))
        await settle()
        world.state.is_stopping = True
        for one in tuple(world.state.connections):
            one.stop()
        await settle()
        assert (idle.is_open, busy.is_open) == (False, True)
        await asyncio.sleep(3.0)
        assert busy.sent.endswith(b"done")
        assert not busy.is_open

    run(test)


class Stuck(Wire):
    """Its client reads nothing: what was written before it closes never gets there."""

    def close(self) -> None:
        self.is_open = False

    def abort(self) -> None:
        self.was_aborted = True
        asyncio.get_running_loop().call_soon(self.lose)


class Listener:
    """What accepts connections, as far as a server that stops asks it."""

    is_open = True

    def close(self) -> None:
        self.is_open = False


def test_a_server_that_has_stopped_has_no_connections() -> None:
    async def test(world: World) -> None:
        wires = [world.connect()[1] for _ in range(3)]
        stuck = Stuck()
        stuck.connection = HttpConnection(world.state)
        stuck.connection.connection_made(stuck)
        listener = Listener()
        server = HttpServer(cast(Acceptor, listener), world.state, "127.0.0.1", 1)
        await server.stop()
        assert not world.state.connections
        assert not listener.is_open
        assert [wire.was_aborted for wire in (*wires, stuck)] == [False, False, False, True]

    run(test)


def test_others_get_something_while_a_long_body_comes() -> None:
    async def main() -> None:
        world = World()
        world.state.limits = HttpLimits()
        connection, wire = world.connect()
        piece, num_pieces = b"x" * 2**18, 16
        head = f"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: {num_pieces * len(piece)}\r\n\r\n"
        connection.data_received(head.encode())
        num_in_a_row, longest = 0, 0
        for _ in range(num_pieces):
            while not wire.is_read:
                num_in_a_row = 0
                await asyncio.sleep(0.001)
            connection.data_received(piece)
            num_in_a_row += 1
            longest = max(longest, num_in_a_row)
        await asyncio.sleep(0.1)
        assert longest == 4
        assert wire.is_read
        assert [body for _, _, body in world.handler.seen] == [piece * num_pieces]
        # One that has closed meanwhile stays so.
        connection.data_received(head.encode() + piece * 4)
        wire.is_read = False
        wire.close()
        await asyncio.sleep(0.1)
        assert not wire.is_read

    run_virtual(main(), max_time_s=60)
