"""The LoRA adapters of a worker, as its steps use them: one after the other, or all at once."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton_kernels.host_copy import to_device
from engine.torch.adapters import Adapter
from engine.torch.decoder import AdapterRows


class StepAdapters(Protocol):
    """A worker's adapters by name; the empty name is of rows without one."""

    @property
    def changes_output(self) -> bool:
        """Whether one of them adds to the output layer."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def rows(
        self, owners: Sequence[str], sampled: Sequence[str], device: torch.device
    ) -> tuple[AdapterRows, ...]:
        """A step's additions. owners: adapter of each token; sampled: of each sampled one."""
        ...


@dataclass(frozen=True, slots=True)
class EachAdapter:
    """Runs a step's adapters one after the other, each on its rows."""

    adapters: Mapping[str, Adapter]

    @property
    def changes_output(self) -> bool:
        """See StepAdapters."""
        return any(adapter.output is not None for adapter in self.adapters.values())

    def __contains__(self, name: str) -> bool:
        return name in self.adapters

    def rows(
        self, owners: Sequence[str], sampled: Sequence[str], device: torch.device
    ) -> tuple[AdapterRows, ...]:
        """See StepAdapters."""
        names = sorted(set(owners) - {""})
        return tuple(
            AdapterRows(
                *(adapter.layers, adapter.embeddings, adapter.output),
                *(_places(name, of_rows, device) for of_rows in (owners, sampled)),
            )
            for name, adapter in ((name, self.adapters[name]) for name in names)
        )


def _places(name: str, owners: Sequence[str], device: torch.device) -> torch.Tensor:
    """Indices of the owners of that name, int64."""
    found = array("q", (i for i, owner in enumerate(owners) if owner == name))
    places = torch.frombuffer(found, dtype=torch.int64) if found else torch.empty(0).long()
    return to_device(places, device)
