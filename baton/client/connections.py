"""As many connections to a gateway as the calls under way need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]

from baton.rpc.channel import MAX_CONCURRENT_STREAMS
from baton.v1 import inference_pb2_grpc

ChannelT = TypeVar("ChannelT")


class Connection(Generic[ChannelT]):
    """One channel, and the services behind it."""

    def __init__(self, channel: ChannelT) -> None:
        self.channel = channel
        either: Any = channel  # the stubs of grpc.Channel and grpc.aio.Channel are one class
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(either)
        self.health: Any = health_pb2_grpc.HealthStub(either)
        self.num_calls = 0
        """Under way."""


class Connections(Generic[ChannelT]):
    """Thread-safe. A server answers MAX_CONCURRENT_STREAMS calls of a connection at once; grpc
    would have further ones wait, and their deadlines run, without a word."""

    def __init__(self, connect: Callable[[], ChannelT]) -> None:
        """connect: makes a channel, which whoever made this closes."""
        self._connect = connect
        self._lock = threading.Lock()
        self._connections: list[Connection[ChannelT]] = []

    def take(self) -> Connection[ChannelT]:
        """A connection for one call, which the caller gives back when the call has ended."""
        with self._lock:
            free = (c for c in self._connections if c.num_calls < MAX_CONCURRENT_STREAMS)
            connection = next(free, None)
            if connection is None:
                connection = Connection(self._connect())
                self._connections.append(connection)
            connection.num_calls += 1
            return connection

    def give_back(self, connection: Connection[ChannelT]) -> None:
        """A call of the connection has ended."""
        with self._lock:
            connection.num_calls -= 1

    def channels(self) -> list[ChannelT]:
        """All that were made."""
        with self._lock:
            return [connection.channel for connection in self._connections]
