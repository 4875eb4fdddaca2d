"""An engine that computes nothing and takes a given time per step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from baton.types import KvLayout, Sample
from engine.interface import Batch, Engine, EngineSpec, Launched, LayersDone
from engine.kv.groups.group import SlotTable
from engine.kv.interface import BlockMemory, HostOrdered
from engine.kv.layout import groups_of
from engine.kv.range import KvRange

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 17
VOCAB_SIZE = 1000

_SAMPLE = Sample(7)


class NoKv(HostOrdered):
    """Implements engine.interface.KvPool without memory; transfers are not allowed."""

    slot_tables: Mapping[int, SlotTable] = MappingProxyType({})
    can_pack = False

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.groups = groups_of(layout)

    def pack(self, block_ids: Sequence[int], piece: KvRange, out: memoryview) -> None:
        raise NotImplementedError

    def unpack(self, block_ids: Sequence[int], piece: KvRange, data: memoryview) -> None:
        raise NotImplementedError

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise NotImplementedError

    def memory_of(self, group: int) -> BlockMemory | None:  # noqa: ARG002
        return None

    def ids_in(self, group: int, block_ids: Sequence[int]) -> Sequence[int]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _StubLaunch:
    """Implements engine.interface.Launched. end_s: time.perf_counter at which a device would
    finish."""

    found: tuple[tuple[Sample, ...], ...]
    end_s: float

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        if (rest_s := self.end_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        return self.found


class StubEngine(Engine):
    """Every row gets the same token."""

    def __init__(
        self, num_blocks: int, step_s: float = 0.0, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        """step_s: seconds per step; CPU and GIL are free meanwhile, as with a device."""
        layout = KvLayout("host-bench", 1, 1, 8, "float32", BLOCK_SIZE)
        self._spec = EngineSpec(
            "stub",
            layout,
            num_blocks,
            VOCAB_SIZE,
            max_model_len,
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
