"""A process around a service that does what its model's name says."""

import asyncio
import atexit
import gc
import logging
import sys

from baton.config import DecodeOptions
from baton.errors import ModelError
from baton.service import OnReady, ReadyReport, main


async def serve(options: DecodeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Pretend to serve."""
    if options.model == "refuse":
        raise ModelError("no such\nweights")
    if options.model == "break":
        raise ZeroDivisionError
    on_ready(ReadyReport("127.0.0.1:5", {"load": 0.5}))
    logging.getLogger("fake").info("at work", extra={"request_id": "r1"})
    await stop.wait()
    if options.model == "deaf":
        sys.stdout.write("will not stop\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def report_frozen() -> None:
    """Print how many objects no collection looks at."""
    sys.stdout.write(f"{gc.get_freeze_count()} frozen\n")


if __name__ == "__main__":
    atexit.register(report_frozen)
    main(DecodeOptions, serve, "decode")
