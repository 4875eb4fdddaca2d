"""The supervisor's list of workers, which a gateway reads on its standard input."""

from __future__ import annotations

import json
import os

import pytest

from baton.errors import ConfigError
from baton.registry import PipeRegistry, WorkerAdded, WorkerRemoved
from baton.types import Tier


async def test_workers_come_and_the_number_stays_taken() -> None:
    """A connection that got the number of the standard input would never be closed."""
    reader, writer = os.pipe()
    registry = PipeRegistry(reader)
    os.write(writer, json.dumps({"address": "h:1", "tier": "decode"}).encode() + b"\n")
    os.close(writer)
    changes = [change async for change in registry.changes()]
    await registry.wait_complete()
    assert changes == [WorkerAdded("h:1", Tier.DECODE)]
    assert os.readlink(f"/proc/self/fd/{reader}") == os.devnull
    os.close(reader)


async def test_a_worker_leaves_a_list_that_was_complete() -> None:
    reader, writer = os.pipe()
    registry = PipeRegistry(reader)
    changes = registry.changes()
    lines = [
        {"address": "h:1", "tier": "decode"},
        {"complete": True},
        {"address": "h:1", "removed": True},
    ]
    os.write(writer, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    assert await anext(changes) == WorkerAdded("h:1", Tier.DECODE)
    assert await anext(changes) == WorkerRemoved("h:1")
    await registry.wait_complete()
    os.close(writer)
    assert [change async for change in changes] == []
    os.close(reader)


def test_a_descriptor_that_is_none_is_refused() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(ConfigError, match="workers_fd"):
        PipeRegistry(reader)
