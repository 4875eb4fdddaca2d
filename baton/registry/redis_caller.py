"""Operations on a Redis that may be down, slow, or emptied at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from baton.errors import ConfigError
from baton.redaction import redacted

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RedisCaller:
    """One connection to Redis, opened anew after each failure. Belongs to one event loop."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """timeout_s: per operation. Raises ConfigError if `url` is no Redis URL."""
        self._url = url
        self._timeout_s = timeout_s
        self._outage = _Outage(redacted(url))
        self._client: Redis | None = None
        """Reused only after a successful operation."""
        try:
            self._new_client()
        except (ValueError, RedisError):
            # The client's messages quote parts of the URL, sometimes the wrong ones.
            fix = "give redis://host:port/db, special characters of a password as %XX"
            raise ConfigError.of("--registry", url, fix) from None

    async def call(self, operation: Callable[[Redis], Awaitable[T]]) -> T | None:
        """Return the operation's result; None if Redis is unreachable, too slow, or refuses.

        After a failure or a cancellation the client is discarded, because its connection may hold a
        stale reply. redis-py sometimes reports a cancellation as a connection error; it is raised
        here as CancelledError.
        """
        num_cancels = _num_cancels()
        try:
            return await self._operate(operation)
        finally:
            if _num_cancels() > num_cancels:
                raise asyncio.CancelledError

    async def _operate(self, operation: Callable[[Redis], Awaitable[T]]) -> T | None:
        client, self._client = self._client or self._new_client(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await operation(client)
        except (RedisError, OSError, TimeoutError) as error:
            self._outage.begin(error)
            await _close(client)
            return None
        except asyncio.CancelledError:
            await _close(client)
            raise
        self._client = client
        self._outage.end()
        return result

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await _close(client)

    def _new_client(self) -> Redis:
        return Redis.from_url(
            self._url,
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            retry=Retry(NoBackoff(), 0),
        )


def _num_cancels() -> int:
    """Number of cancellation requests of the running task."""
    task = asyncio.current_task()
    return task.cancelling() if task else 0


class _Outage:
    """Logs once when Redis becomes unusable, and once when it recovers."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._is_out = False

    def begin(self, error: BaseException) -> None:
        if not self._is_out:
            why = str(error) or "no answer in time"
            if isinstance(error, AuthenticationError):
                why += "; give the password in --registry, as redis://:PASSWORD@host:port/db"
            _log.warning("registry %s cannot be used, going on without: %s", self._where, why)
        self._is_out = True

    def end(self) -> None:
        if self._is_out:
            _log.info("registry %s can be used again", self._where)
        self._is_out = False


async def _close(client: Redis) -> None:
    with suppress(RedisError, OSError):
        await client.aclose()
