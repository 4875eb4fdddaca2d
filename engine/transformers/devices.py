"""What a transformers model gets of Baton's on the kind of device that it is on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.transformers import states
from engine.transformers.convolutions import widen_convolutions
from engine.transformers.device_experts import use_kernels
from engine.transformers.linears import pack_linears
from engine.transformers.shared import Share


class DeviceKind(Protocol):
    """A kind of device."""

    def prepare(self, model: PreTrainedModel, share: Share) -> None:
        """Replace products of a loaded model. share: the rank's."""
        ...

    def most_rows(
        self,
        model: nn.Module,
        layers: tuple[states.StateLayer, ...],
        hidden_size: int,
        dtype: torch.dtype,
    ) -> int:
        """The largest number of sequences with one new token that each layer with a state may be
        called with at once."""
        ...


class Host:
    """A CPU: all linear layers and experts are Baton's, and convolutions in 16 bits where the CPU
    is slow at them. What is called together has the bits of each alone."""

    def prepare(self, model: PreTrainedModel, share: Share) -> None:
        """See DeviceKind."""
        pack_linears(model, share)
        widen_convolutions(model)

    def most_rows(
        self,
        model: nn.Module,
        layers: tuple[states.StateLayer, ...],
        hidden_size: int,
        dtype: torch.dtype,
    ) -> int:
        """See DeviceKind, and engine.transformers.states.most_rows."""
        return states.most_rows(model, layers, hidden_size, dtype)


class Gpu:
    """A GPU, and any other device: experts are Baton's where its kernels read them, linear layers
    torch's. Bits may depend on what is called together."""

    def prepare(self, model: PreTrainedModel, share: Share) -> None:  # noqa: ARG002
        """See DeviceKind."""
        use_kernels(model)

    def most_rows(
        self,
        model: nn.Module,  # noqa: ARG002
        layers: tuple[states.StateLayer, ...],  # noqa: ARG002
        hidden_size: int,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> int:
        """See DeviceKind: any number."""
        return 1 << 20


_KINDS: Mapping[str, DeviceKind] = MappingProxyType({"cpu": Host()})


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device."""
    return _KINDS.get(device.type, Gpu())
