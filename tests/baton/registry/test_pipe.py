"""The supervisor's list of workers, which a gateway reads on its standard input."""

from __future__ import annotations

import json
import os

import pytest

from baton.errors import ConfigError
from baton.registry import PipeRegistry, WorkerAdded
from baton.types import Tier


async def test_workers_come_and_the_number_stays_taken() -> None:
    """A connection that got the number of the standard input would never be closed."""
    reader, writer = os.pipe()
    registry = PipeRegistry(reader)
    os.write(writer, json.dumps({"address": "h:1", "tier": "decode"}).encode() + b"\n")
    os.close(writer)
    changes = [change async for change in registry.changes()]
    await registry.wait_ended()
    assert changes == [WorkerAdded("h:1", Tier.DECODE)]
    assert os.readlink(f"/proc/self/fd/{reader}") == os.devnull
    os.close(reader)


def test_a_descriptor_that_is_none_is_refused() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(ConfigError, match="workers_fd"):
        PipeRegistry(reader)
