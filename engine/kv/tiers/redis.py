"""Redis as a tier that workers share. What it keeps, and for how long, is Redis' own business
(maxmemory and its policy); records expire when nobody has written them for a day."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from baton.errors import ConfigError
from engine.kv.tiers.interface import Evicted, Record, TierFailed

#: Includes the version of the records' format.
_KEY_PREFIX = b"baton:1:kv:"
_EXPIRY_S = 24 * 3600
#: Seconds until a server that does not answer counts as failed.
_TIMEOUT_S = 1.0
#: Keys remembered, so that their records are not written again.
_MAX_KNOWN_KEYS = 1 << 16


class RedisTier:
    """Implements engine.kv.tiers.interface.Tier."""

    name: ClassVar[str] = "store"
    is_shared: ClassVar[bool] = True
    num_bytes: ClassVar[int] = 0

    def __init__(self, url: str, context: bytes, timeout_s: float = _TIMEOUT_S) -> None:
        """context: of the records, see RecordFormat: workers of another keep theirs apart. Does not
        connect. Raises ConfigError if `url` is no Redis URL."""
        self._prefix = _KEY_PREFIX + context.hex()[:16].encode() + b":"
        try:
            self._client = Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except (ValueError, RedisError):
            fix = "give redis://host:port/db, special characters of a password as %XX"
            raise ConfigError.of("--kv-store-url", url, fix) from None
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Keys written here and not missed since, oldest first."""

    def has(self, key: bytes) -> bool:
        return key in self._known

    def touch(self, key: bytes) -> None:
        """The server knows what is used."""

    def put(self, key: bytes, record: Record) -> Sequence[Evicted]:
        try:
            self._client.set(self._prefix + key, memoryview(record), ex=_EXPIRY_S)
        except RedisError as error:
            raise TierFailed(_text(error)) from error
        self._known[key] = None
        while len(self._known) > _MAX_KNOWN_KEYS:
            self._known.popitem(last=False)
        return ()

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        try:
            found = self._client.mget([self._prefix + key for key in keys])
        except RedisError as error:
            raise TierFailed(_text(error)) from error
        records = cast("Sequence[bytes | None]", found)
        for key, record in zip(keys, records, strict=True):
            if record is None:
                self._known.pop(key, None)
        return records

    def remove(self, key: bytes) -> None:
        self._known.pop(key, None)
        try:
            self._client.delete(self._prefix + key)
        except RedisError as error:
            raise TierFailed(_text(error)) from error

    def cool(self, keys: Sequence[bytes]) -> None:
        """Redis keeps records in memory alone."""

    def close(self) -> None:
        self._client.close()


def _text(error: RedisError) -> str:
    """An error in one line, without the URL."""
    return f"the store failed: {type(error).__name__}"
