"""A board in Redis: one hash, with a field for each process."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from baton.registry.redis_caller import RedisCaller

#: Hash of notes, "milliseconds text" each, by process. The key includes the version of its format.
_KEY = "baton:1:board:{%s}"
#: Writes the caller's note; deletes notes of processes that wrote none for a while; returns all.
_EXCHANGE = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], now_ms .. ' ' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local notes = redis.call('HGETALL', KEYS[1])
local found = {}
for i = 1, #notes, 2 do
  local written, text = notes[i + 1]:match('^(%d+) (.*)$')
  if not written or tonumber(written) < now_ms - ARGV[3] then
    redis.call('HDEL', KEYS[1], notes[i])
  elseif notes[i] ~= ARGV[1] then
    found[#found + 1] = notes[i]
    found[#found + 1] = text
  end
end
return found
"""


class RedisBoard:
    """Implements Board in Redis."""

    def __init__(
        self, url: str, name: str, *, lasts_s: float = 3.0, timeout_s: float = 2.0
    ) -> None:
        """name: of the board. lasts_s: of a note. Raises ConfigError if `url` is no Redis URL."""
        self._redis = RedisCaller(url, timeout_s)
        self._key = _KEY % name
        self._process = secrets.token_hex(8)
        self._lasts_ms = round(lasts_s * 1e3)

    async def exchange(self, note: str) -> Mapping[str, str]:
        """See Board."""

        async def exchange(client: Redis) -> Any:
            lasts_ms = str(self._lasts_ms)
            return await client.eval(_EXCHANGE, 1, self._key, self._process, note, lasts_ms)

        found = [part.decode(errors="replace") for part in await self._redis.call(exchange) or ()]
        return dict(zip(found[::2], found[1::2], strict=True))

    async def close(self) -> None:
        """See Board."""
        await self._redis.close()
