"""Charge an exception in a step to the request that caused it, so that the others of its batch go
on (promise 4)."""

from __future__ import annotations

import logging

from baton.engine.interface import (
    Batch,
    DeviceLost,
    Engine,
    Launched,
    LayersDone,
    SequenceSlice,
)
from baton.errors import BatonError, EngineFault
from baton.types import Sample

_log = logging.getLogger(__name__)

#: What a slice came to: one sample per row of it, or why it failed.
SliceOutcome = tuple[Sample, ...] | BatonError


def forward_guarded(
    engine: Engine, batch: Batch, layers_done: LayersDone | None = None
) -> tuple[SliceOutcome, ...]:
    """Run the batch; if it raises, run each slice alone, and let only those fail that raise again.

    A slice that runs again writes the same KV into the same blocks, so `layers_done` may be called
    again for layers it was called for already.
    """
    try:
        return engine.forward(batch, layers_done)
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is charged to one request below
        if len(batch.slices) == 1:
            return (_fault(error),)
        _log.warning("a batch of %d failed; running each alone", len(batch.slices), exc_info=error)
    return tuple(_forward_alone(engine, part, layers_done) for part in batch.slices)


def try_launch(engine: Engine, batch: Batch, layers_done: LayersDone) -> Launched | None:
    """A launch; None if it failed: forward_guarded says by whose fault."""
    try:
        return engine.launch(batch, layers_done)
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it comes again when the batch is run guarded
        _log.warning("a batch of %d could not be launched", len(batch.slices), exc_info=error)
        return None


def try_collect(launched: Launched) -> tuple[tuple[Sample, ...], ...] | None:
    """A launch's samples; None if it failed: forward_guarded says by whose fault."""
    try:
        return launched.samples()
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        _log.warning("a launched batch failed", exc_info=error)
        return None


def _forward_alone(
    engine: Engine, part: SequenceSlice, layers_done: LayersDone | None
) -> SliceOutcome:
    return forward_guarded(engine, Batch((part,)), layers_done)[0]


def _fault(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    _log.error("a request failed in the engine", exc_info=error)
    return EngineFault(f"the engine failed on this request: {type(error).__name__}")
