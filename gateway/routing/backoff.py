"""How long to wait before the next try to connect. Pure."""

from __future__ import annotations

FIRST_S = 0.2
MAX_S = 2.0
_JITTER = 0.5


def backoff_s(num_failures: int, random: float) -> float:
    """Seconds to wait after `num_failures` in a row, at least 1; `random` in [0, 1) spreads gateways out."""
    full_s = min(MAX_S, FIRST_S * 2.0 ** min(num_failures - 1, 16))
    return full_s * (1.0 - _JITTER * random)
