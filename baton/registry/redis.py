"""Registry in Redis: one key per worker, which expires with its lease unless renewed.

Redis may be down, slow, or emptied at any time. A gateway that cannot read the list keeps its last
one; a worker that cannot write retries, and is listed again once it succeeds. Every operation has a
deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from baton.errors import ConfigError
from baton.redaction import redacted
from baton.registry.interface import Change, WorkerAdded, WorkerRemoved
from baton.registry.registration import Registration, from_json, to_json
from baton.types import Tier

_log = logging.getLogger(__name__)

#: Includes the version of the values' format.
KEY_PREFIX = "baton:1:worker:"

#: Keys and values per round trip.
_BATCH = 500

#: Deletes an entry unless another worker at the same address has overwritten it.
_DELETE_OWN = (
    "if redis.call('GET',KEYS[1])==ARGV[1] then return redis.call('DEL',KEYS[1]) end return 0"
)

T = TypeVar("T")


class RedisRegistry:
    """Belongs to one event loop, and runs one of `changes` and `announce` at a time."""

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        lease_s: float = 10.0,
        period_s: float = 1.0,
        timeout_s: float = 2.0,
    ) -> None:
        """model: name of the model to find workers of; used by `changes` only.

        lease_s: seconds that an entry outlives its worker.
        period_s: seconds between two renewals, or two reads of the list.
        timeout_s: per operation. Raises ConfigError if `url` is no Redis URL.
        """
        self._url = url
        self._model = model
        self._lease_s = lease_s
        self._period_s = period_s
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

    async def changes(self) -> AsyncGenerator[Change, None]:
        """See Registry. Reads the list every period."""
        view = View(self._model)
        try:
            while True:
                entries = await self._try(_read_all)
                if entries is not None:
                    new = view.after(entries)
                    _log_others(view, new)
                    for change in changes_between(view, new):
                        yield change
                    view = new
                await asyncio.sleep(self._period_s)
        finally:
            await self._close()

    async def announce(self, current: Callable[[], Registration | None]) -> NoReturn:
        """See Registry."""
        last: tuple[str, str] | None = None
        try:
            while True:
                registration = current()
                if registration is not None:
                    last = (KEY_PREFIX + registration.address, to_json(registration))
                    await self._renew(*last)
                await asyncio.sleep(self._period_s)
        finally:
            if last is not None:
                await self._withdraw(*last)
            await self._close()

    async def _renew(self, key: str, value: str) -> None:
        async def set_with_lease(client: Redis) -> None:
            await client.set(key, value, px=round(self._lease_s * 1e3))

        await self._try(set_with_lease)

    async def _withdraw(self, key: str, value: str) -> None:
        """Tried once, since the lease expires anyway."""

        async def delete_own(client: Redis) -> None:
            await client.eval(_DELETE_OWN, 1, key, value)

        await self._try(delete_own)

    async def _try(self, operation: Callable[[Redis], Awaitable[T]]) -> T | None:
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

    async def _close(self) -> None:
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


async def _read_all(client: Redis) -> list[Registration]:
    keys = [key async for key in client.scan_iter(match=KEY_PREFIX + "*", count=_BATCH)]
    entries = []
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        values: list[Any] = await client.mget(batch)
        for key, value in zip(batch, values, strict=True):
            entry = None if value is None else _understood(key, value)
            if entry is not None:
                entries.append(entry)
    return entries


def _understood(key: object, value: bytes) -> Registration | None:
    try:
        return from_json(value)
    except ValueError as error:
        _log.debug("registry entry %r is not understood: %s", key, error)
        return None


def _log_others(old: View, new: View) -> None:
    for address in sorted(new.others.keys() - old.others.keys()):
        _log.info(
            "worker at %s serves %r, not %r: left to other gateways "
            "(give both the same --served-model-name if that is wrong)",
            address,
            new.others[address],
            new.model,
        )


@dataclass(frozen=True, slots=True)
class View:
    """One gateway's view of the list.

    model: name that this gateway serves; workers of other models are ignored.
    others: addresses of workers of other models, with their model names.
    """

    model: str
    listed: dict[str, Tier] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    def after(self, entries: Iterable[Registration]) -> View:
        """The view after a read that returned `entries`. Draining workers count as removed, because
        they take no more work."""
        listed: dict[str, Tier] = {}
        others: dict[str, str] = {}
        for entry in entries:
            if entry.info.model != self.model:
                others[entry.address] = entry.info.model
            elif not entry.load.is_draining:
                listed[entry.address] = entry.info.tier
        return View(self.model, listed, others)


def changes_between(old: View, new: View) -> tuple[Change, ...]:
    """Changes from `old` to `new`, removals first. An address with a changed tier is removed and
    added."""
    left = sorted(a for a, tier in old.listed.items() if new.listed.get(a) is not tier)
    joined = sorted(a for a, tier in new.listed.items() if old.listed.get(a) is not tier)
    return (
        *map(WorkerRemoved, left),
        *(WorkerAdded(address, new.listed[address]) for address in joined),
    )
