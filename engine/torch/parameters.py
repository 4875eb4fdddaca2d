"""A decoder's parameters before packing, fused as the forward needs them, and the destination of
each tensor of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import torch

from baton_kernels.layer import Layer, Norm
from engine.families.config import ModelConfig
from engine.families.layers import (
    LinearSpec,
    Source,
    VectorSpec,
    describe_layers,
    describe_norm,
    describe_output,
)
from engine.ranks.mesh import ALL_LAYERS, Stage
from engine.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], bias [out] or None."""

    spec: LinearSpec
    weight: torch.Tensor
    bias: torch.Tensor | None

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Views that the checkpoint's tensors fill, by tensor name; a fused layer has several."""
        at = 0
        for name, group in groupby(self.spec.sources, key=lambda source: source.name):
            sources = tuple(group)
            end = at + sum(len(source.rows) for source in sources)
            yield f"{name}.weight", Target(self.weight[at:end], sources)
            if self.bias is not None:
                bias = Target(self.bias[at:end], sources, is_zero=self.spec.is_part)
                yield f"{name}.bias", bias
            at = end


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector, such as the weight of a norm. numbers: [size]."""

    spec: VectorSpec
    numbers: torch.Tensor

    def target(self) -> tuple[str, Target]:
        """The destination of its tensor, by the tensor's name in a checkpoint."""
        return self.spec.name, Target(self.numbers, (self.spec.source,), self.spec.offset)


DenseLayer = Layer[Linear, Vector]


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a tensor of a checkpoint: `tensor` is filled with the source's row ranges,
    stacked. offset: added to the checkpoint's values. is_zero: filled with zeros instead, because
    another rank has the values."""

    tensor: torch.Tensor
    sources: tuple[Source, ...]
    offset: float = 0.0
    is_zero: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor in the checkpoint."""
        first, own = self.sources[0], self.tensor.shape[1:]
        columns = first.columns
        return torch.Size((first.num_rows, *((columns.num,) if columns and own else own)))

    def fill(self, whole: torch.Tensor) -> None:
        """Copy the rows from the checkpoint's tensor."""
        if self.is_zero:
            self.tensor.zero_()
            return
        at = 0
        for source in self.sources:
            rows = source.take(whole)
            # From page-locked memory a copy to a GPU overlaps with reading the next tensor; torch
            # keeps such memory alive until the copy is done.
            self.tensor[at : at + len(rows)].copy_(rows, non_blocking=True)
            at += len(rows)
        if self.offset:
            self.tensor.add_(self.offset)


class Fillable(Protocol):
    """Destination of a checkpoint's tensors. has_stacked_experts: the checkpoint stacks experts,
    see engine.torch.stacked_experts."""

    @property
    def device(self) -> torch.device: ...

    @property
    def has_stacked_experts(self) -> bool: ...

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Required tensors by name, with the memory to fill; a name may occur several times."""
        ...

    def linear_names(self) -> frozenset[str]:
        """Names of the checkpoint's linear layers that may be quantised."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor without a target is expected in the checkpoint."""
        ...


_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters of a rank; a Fillable. With tied embeddings, lm_head's weight [vocab, hidden]
    is the embeddings tensor itself; either has the rank's part of the vocabulary. Stages after the
    first have no lm_head, and embeddings [0, hidden].

    rows: of the embeddings in the checkpoint. layers: a list, because packing removes layers one by
    one. unused_layers: further layers of the checkpoint, for other uses. other_layers: those of
    other stages.
    """

    embeddings: torch.Tensor
    rows: Source
    layers: list[DenseLayer]
    norm: Norm[Vector]
    lm_head: Linear | None
    is_tied: bool
    has_stacked_experts: bool = False
    unused_layers: range = range(0)
    other_layers: frozenset[int] = frozenset()

    @property
    def device(self) -> torch.device:
        """Device of the parameters that are not packed."""
        return self.embeddings.device

    @property
    def linears(self) -> list[Linear]:
        """All linear layers."""
        own = [linear for layer in self.layers for linear in layer.linears]
        return own if self.lm_head is None else [*own, self.lm_head]

    def targets(self) -> Iterator[tuple[str, Target]]:
        yield self.norm.weight.target()
        if self.lm_head is not None:
            yield f"{self.rows.name}.weight", Target(self.embeddings, (self.rows,))
            if not self.is_tied:
                yield from self.lm_head.targets()
        for layer in self.layers:
            yield from layer_targets(layer)

    def linear_names(self) -> frozenset[str]:
        return quantizable_names(
            self.linears[:-1] if self.is_tied and self.lm_head else self.linears
        )

    def is_elsewhere(self, name: str) -> bool:
        """Whether other stages have a tensor of the checkpoint."""
        if layer := _OF_LAYER.match(name):
            return int(layer[1]) in self.other_layers
        return self.lm_head is None and name.startswith(("model.embed_tokens.", "lm_head."))

    def ignores(self, name: str) -> bool:
        layer = _OF_LAYER.match(name)
        is_unused = layer is not None and int(layer[1]) in self.unused_layers
        return is_unused or (self.is_tied and name == "lm_head.weight")


def layer_targets(layer: DenseLayer) -> Iterator[tuple[str, Target]]:
    """See Fillable.targets."""
    for vector in layer.vectors:
        yield vector.target()
    for linear in layer.linears:
        yield from linear.targets()


def quantizable_names(linears: Iterable[Linear]) -> frozenset[str]:
    """See Fillable.linear_names."""
    specs = [linear.spec for linear in linears]
    return frozenset(name for spec in specs if not spec.is_router for name in spec.names)


@dataclass(frozen=True, slots=True)
class EmptyTensors:
    """Allocates parameters. dtype: of all except wide (float32) ones; of_linears: device of linear
    layers, without routers, until they are packed; device: of the rest."""

    dtype: torch.dtype
    device: torch.device
    of_linears: torch.device

    def linear(self, spec: LinearSpec) -> Linear:
        of = torch.float32 if spec.is_wide else self.dtype
        on = self.device if spec.is_router else self.of_linears
        bias = torch.empty(spec.num_out, device=on, dtype=of) if spec.has_bias else None
        return Linear(spec, torch.empty(spec.num_out, spec.num_in, device=on, dtype=of), bias)

    def vector(self, spec: VectorSpec) -> Vector:
        of = torch.float32 if spec.is_wide else self.dtype
        return Vector(spec, torch.empty(len(spec.source.rows), device=self.device, dtype=of))


def empty_parameters(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    of_linears: torch.device | None = None,
    stage: Stage = ALL_LAYERS,
) -> Parameters:
    """Allocate the rank's parameters by the config's shapes, not yet filled.

    of_linears: device of linear layers until they are packed, if not `device`.
    """
    empty, own = EmptyTensors(dtype, device, of_linears or device), stage.layers(config.num_layers)
    layers = [spec.map(empty.linear, empty.vector) for spec in describe_layers(config, shard, own)]
    output = describe_output(config, shard)
    rows = replace(output.sources[0], name="model.embed_tokens")
    num_rows = len(rows.rows) if stage.is_first else 0
    embeddings = torch.empty(num_rows, config.hidden_size, dtype=dtype, device=device)
    if not stage.is_first:
        lm_head = None
    elif config.is_tied:
        lm_head = Linear(output, embeddings, None)
    else:
        lm_head = empty.linear(output)
    norm = describe_norm(config).map(empty.vector)
    experts = config.traits.experts
    is_stacked = experts is not None and experts.is_stacked
    unused = range(config.num_layers, config.num_layers + config.traits.num_unused_layers)
    others = frozenset(range(config.num_layers)) - frozenset(own)
    return Parameters(
        *(embeddings, rows, layers, norm, lm_head, config.is_tied, is_stacked, unused, others)
    )


def whole_target(tensor: torch.Tensor) -> Target:
    """A target for a tensor in the checkpoint's own shape."""
    return Target(tensor, (Source("", range(len(tensor)), len(tensor)),))
