"""Registry in Redis: one key per worker, which expires with its lease unless renewed.

Redis may be down, slow, or emptied at any time. A gateway that cannot read the list keeps its last
one; a worker that cannot write retries, and is listed again once it succeeds. Every operation has a
deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from redis.asyncio import Redis

from baton.registry.interface import Change, WorkerAdded, WorkerRemoved
from baton.registry.redis_caller import RedisCaller
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
        self._model = model
        self._lease_s = lease_s
        self._period_s = period_s
        self._redis = RedisCaller(url, timeout_s)

    async def changes(self) -> AsyncGenerator[Change, None]:
        """See Registry. Reads the list every period."""
        view = View(self._model)
        try:
            while True:
                entries = await self._redis.call(_read_all)
                if entries is not None:
                    new = view.after(entries)
                    _log_others(view, new)
                    for change in changes_between(view, new):
                        yield change
                    view = new
                await asyncio.sleep(self._period_s)
        finally:
            await self._redis.close()

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
            await self._redis.close()

    async def _renew(self, key: str, value: str) -> None:
        async def set_with_lease(client: Redis) -> None:
            await client.set(key, value, px=round(self._lease_s * 1e3))

        await self._redis.call(set_with_lease)

    async def _withdraw(self, key: str, value: str) -> None:
        """Tried once, since the lease expires anyway."""

        async def delete_own(client: Redis) -> None:
            await client.eval(_DELETE_OWN, 1, key, value)

        await self._redis.call(delete_own)


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
