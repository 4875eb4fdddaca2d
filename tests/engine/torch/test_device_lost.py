"""A device that fails for good ends the engine; whatever else goes wrong in a step is charged to a
request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.errors import EngineFault
from baton.types import Sample
from engine.interface import (
    Batch,
    DeviceLost,
    Launched,
    LayersDone,
    forward_guarded,
    try_collect,
    try_launch,
)
from engine.oracle import OracleEngine, OracleOptions
from engine.torch.engine import device_checked


def works() -> None:
    pass


def has_failed() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("wait_device", "error", "expected"),
    [
        (works, RuntimeError("x"), RuntimeError),
        (has_failed, RuntimeError("x"), DeviceLost),
        (has_failed, ValueError("told by another call"), DeviceLost),
        (has_failed, torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (has_failed, EngineFault("x"), EngineFault),
    ],
)
def test_what_an_error_means(
    wait_device: Callable[[], None], error: Exception, expected: type[Exception]
) -> None:
    with pytest.raises(expected) as caught, device_checked(wait_device):
        raise error
    assert caught.type is expected


class Lost(OracleEngine):
    """Its device fails at every launch."""

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:  # noqa: ARG002
        raise DeviceLost("gone")


class LostLaunch:
    """Its device fails while it is computed."""

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        raise DeviceLost("gone")


def test_no_request_is_charged_with_it() -> None:
    engine, batch = Lost(OracleOptions(num_blocks=8)), Batch(())
    with pytest.raises(DeviceLost):
        forward_guarded(engine, batch)
    with pytest.raises(DeviceLost):
        try_launch(engine, batch, lambda _first, _number: None)
    with pytest.raises(DeviceLost):
        try_collect(LostLaunch())
