"""A collector for each test that asks for one; what the services of a test export goes there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtlpReceiver]:
    """Services started while this is there export to it, at the latest when they stop."""
    async with otlp_receiver() as seen:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{seen.address}")
        yield seen
