"""Ends exporters without waiting for a collector that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


def close_within(closers: Sequence[Callable[[], None]], timeout_s: float) -> None:
    """Call all at once, and return when they are done, or after `timeout_s`; what is late then ends
    with the process."""
    deadline_s = time.monotonic() + timeout_s
    threads = [
        threading.Thread(target=closer, name="telemetry-close", daemon=True) for closer in closers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
