"""As many connections to a gateway as the calls under way need, and the next gateway where one
fails."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]

from baton.client.settings import Metadata
from baton.rpc.channel import MAX_CONCURRENT_STREAMS
from baton.v1 import inference_pb2, inference_pb2_grpc

ChannelT = TypeVar("ChannelT")


class Connection(Generic[ChannelT]):
    """One channel, and the services behind it."""

    def __init__(self, channel: ChannelT, address: str) -> None:
        self.channel = channel
        self.address = address
        either: Any = channel  # the stubs of grpc.Channel and grpc.aio.Channel are one class
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(either)
        self.health: Any = health_pb2_grpc.HealthStub(either)
        self.num_calls = 0
        """Under way."""


class Connections(Generic[ChannelT]):
    """Thread-safe. A server answers MAX_CONCURRENT_STREAMS calls of a connection at once; grpc
    would have further ones wait, and their deadlines run, without a word."""

    def __init__(self, connect: Callable[[str], ChannelT], addresses: Sequence[str]) -> None:
        """connect: makes a channel to an address, which whoever made this closes. addresses: of
        gateways that can stand in for each other; the first one is used until it fails."""
        self._connect = connect
        self._addresses = addresses
        self._place = 0
        """Of the address in use."""
        self._lock = threading.Lock()
        self._connections: list[Connection[ChannelT]] = []

    def take(self) -> Connection[ChannelT]:
        """A connection for one call, which the caller gives back when the call has ended."""
        with self._lock:
            address = self._addresses[self._place]
            there = (c for c in self._connections if c.address == address)
            free = (c for c in there if c.num_calls < MAX_CONCURRENT_STREAMS)
            connection = next(free, None)
            if connection is None:
                connection = Connection(self._connect(address), address)
                self._connections.append(connection)
            connection.num_calls += 1
            return connection

    def avoid(self, connection: Connection[ChannelT]) -> None:
        """A call of the connection failed, and may succeed elsewhere: use the next address, if that
        has not been done."""
        with self._lock:
            if connection.address == self._addresses[self._place]:
                self._place = (self._place + 1) % len(self._addresses)

    def give_back(self, connection: Connection[ChannelT]) -> None:
        """A call of the connection has ended."""
        with self._lock:
            connection.num_calls -= 1

    def channels(self) -> list[ChannelT]:
        """All that were made."""
        with self._lock:
            return [connection.channel for connection in self._connections]


class GenerateCalls(Generic[ChannelT]):
    """The calls of one stream: the first, and those that go on behind what came of the ones
    before."""

    def __init__(
        self,
        connections: Connections[ChannelT],
        request: inference_pb2.GenerateRequest,
        metadata: Metadata,
    ) -> None:
        self._connections = connections
        self._request = request
        self._metadata = metadata
        self._last: Connection[ChannelT] | None = None
        sampling = request.sampling
        sends_all_at_its_end = sampling.HasField("beam_search") or sampling.HasField("best_of")
        self.can_go_on = not sends_all_at_its_end
        """Whether a gateway takes up an answer of which something came."""
        if self.can_go_on and not sampling.HasField("seed"):
            # Drawn here, so that every gateway draws the same tokens with it.
            sampling.seed = secrets.randbits(64)

    def open(self, timeout_s: float, so_far: Iterable[inference_pb2.ChoiceSoFar]) -> Any:
        """A call of Generate, to be cancelled or read to its end. so_far: see
        GenerateRequest.resume_from."""
        if self._last is not None:
            self._connections.avoid(self._last)
        connection = self._last = self._connections.take()
        del self._request.resume_from[:]
        self._request.resume_from.extend(so_far)
        call = connection.inference.Generate(
            self._request, timeout=timeout_s, metadata=self._metadata
        )
        call.add_done_callback(lambda _: self._connections.give_back(connection))
        return call
