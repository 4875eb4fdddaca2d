"""A decode worker whose engine computes nothing, for --oracle-step-ms a step: all that it costs is
the worker's own.

Run as a child of `bench.host`, in place of decode_svc, with its options.
"""

from __future__ import annotations

import asyncio

from baton.config import DecodeOptions
from baton.service import OnReady, main
from bench.stub_engine import StubEngine
from decode_svc.server import serve_decode

_NUM_BLOCKS = 1 << 16


def _stub_engine(options: DecodeOptions) -> StubEngine:
    return StubEngine(_NUM_BLOCKS, options.oracle_step_ms / 1e3)


async def serve_stub(options: DecodeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Decode worker without a model."""
    await serve_decode(options, stop, on_ready, _stub_engine)


if __name__ == "__main__":
    main(DecodeOptions, serve_stub, "decode")
