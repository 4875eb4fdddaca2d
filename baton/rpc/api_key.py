"""API keys: callers send `authorization: Bearer KEY`. Only health checks need no key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.errors import Unauthenticated
from baton.rpc import health
from baton.rpc.interceptor import Continuation, Handler

Metadata = Iterable[tuple[str, str | bytes]]

_METADATA_KEY = "authorization"
_SCHEME = "bearer "
_OPEN = f"/{health.SERVICE_NAME}/"


class ApiKeys:
    """The keys that a server accepts, stored as digests."""

    def __init__(self, api_keys: Iterable[str]) -> None:
        self._digests = tuple(map(digest_of, api_keys))

    def admit(self, metadata: Metadata | None) -> bool:
        """Whether the caller sent one of the keys."""
        shown = shown_digest(metadata)
        # Compare all, each in constant time, so that the time reveals nothing about a key.
        return sum([hmac.compare_digest(shown, known) for known in self._digests]) > 0


def refusal() -> Unauthenticated:
    """The error for a caller without a valid key."""
    return Unauthenticated(
        "this gateway wants an API key; send one of its keys: "
        "api_key= of the client, BATON_API_KEY of the command line, or authorization: Bearer KEY"
    )


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key before any of their request is read. Must be placed behind
    ErrorInterceptor, which converts the refusal into a status."""

    def __init__(self, api_keys: Iterable[str]) -> None:
        self._api_keys = ApiKeys(api_keys)

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the handler, or one that raises Unauthenticated."""
        is_open = handler_call_details.method.startswith(_OPEN)
        if is_open or self._api_keys.admit(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        return _REFUSING


def shown_digest(metadata: Metadata | None) -> bytes:
    """Digest of the caller's key; empty if there is none, or more than one."""
    shown = [value for key, value in metadata or () if key == _METADATA_KEY]
    if len(shown) != 1 or not isinstance(shown[0], str):
        return b""
    if not shown[0].lower().startswith(_SCHEME):
        return b""
    return digest_of(shown[0][len(_SCHEME) :])


def digest_of(api_key: str) -> bytes:
    """Digest of a key."""
    return hashlib.sha256(api_key.encode()).digest()


async def _refuse(requests: AsyncIterator[Any], context: Any) -> NoReturn:  # noqa: ARG001
    raise refusal()


#: stream_stream for all calls, because it starts before a message has been read.
_REFUSING: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
