"""A lease in Redis: one key with its holder and term, which expires unless renewed, and one with
the number that the last holder recorded."""

from __future__ import annotations

import secrets
from typing import Any

from redis.asyncio import Redis

from baton.registry.redis_caller import RedisCaller

#: Keys of the lease, of its last term, which is never deleted, and of the recorded number. They
#: include the version of the values' format; braces keep all on one node of a cluster.
_LEASE_KEY, _TERM_KEY = "baton:1:planner:{%s}", "baton:1:planner-term:{%s}"
_NUMBER_KEY = "baton:1:planner-workers:{%s}"
#: Time after which a number that nobody renews says nothing any more, in milliseconds.
_NUMBER_MS = 600_000

#: Renews the caller's lease, or takes a free one for the next term. Returns the term; 0 if another
#: has the lease.
_HOLD = """
local held = redis.call('GET', KEYS[1])
if held then
  local owner, term = held:match('^(%S+) (%d+)$')
  if owner ~= ARGV[1] then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(term)
end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local term = math.max(last + 1, now_ms)
redis.call('SET', KEYS[2], term)
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. term, 'NX', 'PX', ARGV[2])
return term
"""

#: Records a number unless it is empty, and returns the recorded one, 0 for none; -1, and nothing is
#: written, if the caller does not have the lease.
_RECORD = """
local held = redis.call('GET', KEYS[1])
if not held or held:match('^(%S+) ') ~= ARGV[1] then return -1 end
if ARGV[2] ~= '' then redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
return tonumber(redis.call('GET', KEYS[2]) or '0')
"""


class RedisLease:
    """Implements baton.registry.lease.Lease.

    Terms order what leaders do even where one was suspended beyond its lease, since workers refuse
    orders of earlier terms. A term is at least Redis's clock in milliseconds, so that terms grow
    even where Redis lost its data.
    """

    def __init__(
        self, url: str, model: str, *, lease_s: float = 10.0, timeout_s: float = 2.0
    ) -> None:
        """model: whose workers the lease is about. Raises ConfigError if `url` is no Redis URL."""
        self._redis = RedisCaller(url, timeout_s)
        self._keys = (_LEASE_KEY % model, _TERM_KEY % model)
        self._number_key = _NUMBER_KEY % model
        self.lasts_s = lease_s
        self._owner = secrets.token_hex(8)
        self._lease_ms = round(lease_s * 1e3)

    async def hold(self) -> int | None:
        """See Lease."""

        async def hold(client: Redis) -> Any:
            return await client.eval(_HOLD, 2, *self._keys, self._owner, str(self._lease_ms))

        return await self._redis.call(hold) or None

    async def record(self, number: int | None) -> int | None:
        """See Lease."""
        text = "" if number is None else str(number)

        async def record(client: Redis) -> Any:
            keys = (self._keys[0], self._number_key)
            return await client.eval(_RECORD, 2, *keys, self._owner, text, str(_NUMBER_MS))

        recorded = await self._redis.call(record)
        return None if recorded is None or recorded < 0 else int(recorded)

    async def close(self) -> None:
        """See Lease."""
        await self._redis.close()
