"""An engine that computes nothing, and takes as long about it as it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.types import KvLayout, KvRange, Sample
from engine.interface import Batch, Engine, EngineSpec, HostOrdered, Launched, LayersDone

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 17
VOCAB_SIZE = 1000

_SAMPLE = Sample(7)


class NoKv(HostOrdered):
    """Implements engine.interface.KvPool without memory: nothing may be moved."""

    slots = state_slots = None

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        raise NotImplementedError

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        raise NotImplementedError

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _StubLaunch:
    """Implements engine.interface.Launched. end_s: when a device would be done with it, of
    time.perf_counter."""

    found: tuple[tuple[Sample, ...], ...]
    end_s: float

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        if (rest_s := self.end_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        return self.found


class StubEngine(Engine):
    """Every row gets the same token."""

    def __init__(self, num_blocks: int, step_s: float = 0.0) -> None:
        """step_s: what a step takes, in seconds; as on a device, the processor and Python's lock
        are free meanwhile."""
        layout = KvLayout("host-bench", 1, 1, 8, "float32", BLOCK_SIZE)
        self._spec = EngineSpec(
            "stub",
            layout,
            num_blocks,
            VOCAB_SIZE,
            MAX_MODEL_LEN,
            max_num_launches=2,
            computes_aside=True,
        )
        self._kv = NoKv(layout, num_blocks)
        self._step_s = step_s
        self._end_s = 0.0

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def kv(self) -> NoKv:
        return self._kv

    def launch(
        self,
        batch: Batch,
        layers_done: LayersDone | None = None,  # noqa: ARG002
    ) -> Launched:
        self._end_s = max(self._end_s, time.perf_counter()) + self._step_s
        found = tuple((_SAMPLE,) * len(part.rows) for part in batch.slices)
        return _StubLaunch(found, self._end_s)
