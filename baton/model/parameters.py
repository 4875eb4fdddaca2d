"""A decoder's parameters, fused as the forward wants them, before they are packed, and where each
tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from baton.model.config import ModelConfig
from baton.model.layers import (
    LinearSpec,
    Source,
    VectorSpec,
    describe_layers,
    describe_norm,
    describe_output,
)
from baton.model.shard import WHOLE, Shard
from baton_kernels.layer import Layer, Norm


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], bias [out] or none."""

    spec: LinearSpec
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Vector:
    """numbers [size]."""

    spec: VectorSpec
    numbers: torch.Tensor


DenseLayer = Layer[Linear, Vector]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of a checkpoint goes: `tensor` has the rows that the sources give, one below
    the other. offset: added to what the checkpoint has."""

    tensor: torch.Tensor
    sources: tuple[Source, ...]
    offset: float = 0.0

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor in the checkpoint."""
        return torch.Size((self.sources[0].num_rows, *self.tensor.shape[1:]))

    def fill(self, whole: torch.Tensor) -> None:
        """Take the rows from the checkpoint's tensor."""
        at = 0
        for source in self.sources:
            rows = source.take(whole)
            # Out of page-locked memory a copy to a GPU runs while the next tensor is taken; torch
            # keeps such memory until the copy is done.
            self.tensor[at : at + len(rows)].copy_(rows, non_blocking=True)
            at += len(rows)
        if self.offset:
            self.tensor.add_(self.offset)


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters of a rank. lm_head's weight [vocab, hidden] is of embeddings itself where they
    are tied. has_stacked_experts: whether the checkpoint has them as baton.model.stacked_experts
    says.

    layers: a list, because packing takes them out of it one by one. unused_layers: which the
    checkpoint has besides, for other uses.
    """

    embeddings: torch.Tensor
    layers: list[DenseLayer]
    norm: Norm[Vector]
    lm_head: Linear
    is_tied: bool
    has_stacked_experts: bool = False
    unused_layers: range = range(0)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Each tensor that a checkpoint must have, and the memory that it is to fill; some have
        several."""
        yield "model.embed_tokens.weight", _whole(self.embeddings)
        yield _of_vector(self.norm.weight)
        if not self.is_tied:
            yield from _split(self.lm_head)
        for layer in self.layers:
            yield from map(_of_vector, layer.vectors)
            for linear in layer.linears:
                yield from _split(linear)

    def linear_names(self) -> frozenset[str]:
        """The linear layers of the checkpoint that may be quantised, by name."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        if not self.is_tied:
            linears.append(self.lm_head)
        specs = [linear.spec for linear in linears]
        return frozenset(name for spec in specs if not spec.is_router for name in spec.names)


def empty_parameters(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    of_linears: torch.device | None = None,
) -> Parameters:
    """Parameters of the config's shapes, as many of them as the rank holds, not yet filled.

    of_linears: where linear layers are until they are packed, if not on `device`.
    """

    def empty(*shape: int, on: torch.device = device, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=on)

    def linear(spec: LinearSpec) -> Linear:
        of = torch.float32 if spec.is_wide else dtype
        on = device if spec.is_router else linears
        bias = empty(spec.num_out, on=on, of=of) if spec.has_bias else None
        return Linear(spec, empty(spec.num_out, spec.num_in, on=on, of=of), bias)

    def vector(spec: VectorSpec) -> Vector:
        of = torch.float32 if spec.is_wide else dtype
        return Vector(spec, empty(len(spec.source.rows), of=of))

    linears = of_linears or device
    layers = [spec.map(linear, vector) for spec in describe_layers(config, shard)]
    embeddings = empty(config.vocab_size, config.hidden_size)
    output = describe_output(config, shard)
    if config.is_tied:
        lm_head = Linear(output, output.sources[0].take(embeddings), None)
    else:
        lm_head = linear(output)
    norm = describe_norm(config).map(vector)
    experts = config.traits.experts
    is_stacked = experts is not None and experts.is_stacked
    unused = range(config.num_layers, config.num_layers + config.traits.num_unused_layers)
    return Parameters(embeddings, layers, norm, lm_head, config.is_tied, is_stacked, unused)


def _whole(tensor: torch.Tensor) -> Target:
    return Target(tensor, (Source("", range(len(tensor)), len(tensor)),))


def _of_vector(vector: Vector) -> tuple[str, Target]:
    spec = vector.spec
    return spec.name, Target(vector.numbers, (spec.source,), spec.offset)


def _split(linear: Linear) -> Iterator[tuple[str, Target]]:
    """What a fused linear is made of, by the names of tensors in a checkpoint. The targets are
    views."""
    at = 0
    for name, group in groupby(linear.spec.sources, key=lambda source: source.name):
        sources = tuple(group)
        end = at + sum(len(source.rows) for source in sources)
        yield f"{name}.weight", Target(linear.weight[at:end], sources)
        if linear.bias is not None:
            yield f"{name}.bias", Target(linear.bias[at:end], sources)
        at = end
