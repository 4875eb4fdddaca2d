"""Names of requests: what the client calls it, and what we call it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from baton.rpc.status import REQUEST_ID_KEY

_VALID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SUFFIX_BYTES = 6


def unique_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The caller's x-request-id, if it gave one that is valid, or a fresh name; with a suffix that makes it unique.

    Two requests of one name never meet in a queue, a cache or a ticket.
    """
    given = next((value for key, value in metadata or () if key == REQUEST_ID_KEY), "")
    suffix = secrets.token_hex(_SUFFIX_BYTES)
    if isinstance(given, str) and _VALID.fullmatch(given):
        return f"{given}-{suffix}"
    return f"req-{suffix}"
