"""A grpc.aio server that accepts several calls of a method at a time.

grpc.aio asks its core for one call of each method, and for the next one after several turns of the
event loop: where a turn takes milliseconds, a few hundred calls a second are accepted, and all
others wait unseen in the core, until it drops them. Here the core has so many requests for calls
that those that come in a burst are there at once.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, cast

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from baton.rpc.channel import Options

#: Calls of a method that are requested from the core, or accepted and not started, at a time.
_NUM_REQUESTED = 32

#: What this needs of grpc, which does not promise it.
_NEEDED = ("_make_request_call_future", "_request_registered_call")


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Options,
    max_concurrent_rpcs: int | None,
) -> grpc.aio.Server:
    """As grpc.aio.server. With a grpc that is made otherwise, calls are accepted one by one."""
    if all(hasattr(cygrpc.AioServer, name) for name in _NEEDED):
        return cast(grpc.aio.Server, _Server(interceptors, options, max_concurrent_rpcs))
    return grpc.aio.server(
        interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_concurrent_rpcs
    )


class _Server(aio_server.Server):
    """With another core than its base makes."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Options,
        max_concurrent_rpcs: int | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._server = _Acceptor(loop, None, (), interceptors, options, max_concurrent_rpcs)


class _Acceptor(cygrpc.AioServer):  # type: ignore[misc]
    """Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *arguments: Any) -> None:
        super().__init__(loop, *arguments)
        self._event_loop = loop
        self._num_requested: defaultdict[bytes | None, int] = defaultdict(int)
        """Requests at the core, by method; None: of all that are not registered."""
        self._accepted: defaultdict[bytes | None, deque[Any]] = defaultdict(deque)
        """Calls that the server has not taken."""
        self._waiters: dict[bytes | None, asyncio.Future[Any]] = {}
        """The server waits for the next call by these."""

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """The next call. Called by the server's loop once the last one was taken."""
        next_call: asyncio.Future[Any] = self._event_loop.create_future()
        if self._accepted[method]:
            next_call.set_result(self._accepted[method].popleft())
        else:
            self._waiters[method] = next_call
        self._request_more(method)
        return next_call

    def _request_more(self, method: bytes | None) -> None:
        while self._num_requested[method] + len(self._accepted[method]) < _NUM_REQUESTED:
            self._num_requested[method] += 1
            requested = super()._make_request_call_future(method)
            requested.add_done_callback(functools.partial(self._on_call, method))

    def _on_call(self, method: bytes | None, requested: asyncio.Future[Any]) -> None:
        self._num_requested[method] -= 1
        if requested.cancelled():
            return
        accepted, waiter = self._accepted[method], self._waiters.pop(method, None)
        error = requested.exception()
        if waiter is not None and not waiter.done():
            if error is None:
                waiter.set_result(requested.result())
            else:
                waiter.set_exception(error)
        elif not self.is_running():
            accepted.clear()  # which ends these calls
        elif error is None:
            accepted.append(requested.result())
