"""All LoRA adapters of a worker on a GPU: every product of a step has its additions in two launches
and a sum, whichever adapters the rows have.

Which row has which adapter is a tensor, so that a recorded step reads it anew at each replay, and
no adapter needs a recording of its own. Addresses of weights are in tensors, too; the adapters of a
worker stay as long as its engine. A row's result depends on the row and its own adapter alone.

    y[r] += up[n(r)] down[n(r)] x[r]    n(r): number of the row's adapter; the last one adds nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from baton_kernels.experts import GroupedLinear, RowOrder, grouped_linear, order_rows
from baton_kernels.host_copy import to_device
from baton_kernels.layer import Attention, Experts, LatentAttention, Mlp
from baton_kernels.linear import Linear, PlainLinear
from engine.torch.adapters import Adapter, AdapterLayer, LowRank, LowRankTable
from engine.torch.decoder import AdapterRows


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """of_row [rows] int32: number of each row's adapter, see GroupedAdapters; order: of
    order_rows."""

    of_row: torch.Tensor
    order: RowOrder | None


@dataclass(frozen=True, slots=True)
class GroupedLowRank:
    """The additions of all adapters to a linear layer, and one that is zero."""

    down: GroupedLinear
    up: GroupedLinear

    @property
    def is_readable(self) -> bool:
        """Whether kernels read the weights of all adapters in one launch."""
        return _is_readable(self.down) and _is_readable(self.up)

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: AdapterNumbers) -> None:
        """See engine.torch.adapters.LowRank."""
        y.add_(self._of(x, rows))

    def add_to_logits(self, y: torch.Tensor, x: torch.Tensor, rows: AdapterNumbers) -> None:
        """See engine.torch.adapters.LowRank."""
        y.add_(self._of(x, rows))

    def _of(self, x: torch.Tensor, rows: AdapterNumbers) -> torch.Tensor:
        numbers, order = rows.of_row, rows.order
        inner = grouped_linear(x, numbers, self.down, 1, order)
        return grouped_linear(inner, numbers, self.up, 1, order)


@dataclass(frozen=True, slots=True)
class GroupedTable:
    """The additions of all adapters to the embeddings. down: [adapters, vocab, rank]."""

    down: torch.Tensor
    up: GroupedLinear

    @property
    def is_readable(self) -> bool:
        """See GroupedLowRank."""
        return _is_readable(self.up)

    def add_to(self, y: torch.Tensor, token_ids: torch.Tensor, rows: AdapterNumbers) -> None:
        """Add in place to y [rows, hidden], for token_ids [rows]."""
        # Any row of the table does for a token without an adapter, for its `up` is zero.
        tables = rows.of_row.clamp(max=len(self.down) - 1).long()
        inner = self.down[tables, token_ids]
        y.add_(grouped_linear(inner, rows.of_row, self.up, 1, rows.order))


def _is_readable(layer: GroupedLinear) -> bool:
    return layer.weights is not None and layer.weights.is_aligned


#: Ranks are padded to the largest of a layer and a multiple of this, so that kernels load 16 bytes
#: at a time.
_RANK_STEP = 16


@dataclass(frozen=True, slots=True)
class GroupedAdapters:
    """See StepAdapters. numbering: the adapters' numbers by name, and that of rows without one, the
    last, by the empty name. embeddings, output: see Adapter."""

    numbering: Mapping[str, int]
    layers: tuple[AdapterLayer, ...]
    embeddings: GroupedTable | None
    output: GroupedLowRank | None

    @property
    def changes_output(self) -> bool:
        """See StepAdapters."""
        return self.output is not None

    def __contains__(self, name: str) -> bool:
        return name in self.numbering

    def rows(
        self, owners: Sequence[str], sampled: Sequence[str], device: torch.device
    ) -> tuple[AdapterRows, ...]:
        """See StepAdapters."""
        own = self._of_rows(owners, device)
        of_sampled = own if owners == sampled else self._of_rows(sampled, device)
        return (AdapterRows(self.layers, self.embeddings, self.output, own, of_sampled),)

    def of_tokens(self, numbers: torch.Tensor) -> AdapterRows:
        """Additions to a step with a sampled row for each token. numbers [tokens], on the device,
        of their adapters."""
        own = self._ordered(numbers.to(torch.int32))
        return AdapterRows(self.layers, self.embeddings, self.output, own, own)

    def _of_rows(self, owners: Sequence[str], device: torch.device) -> AdapterNumbers:
        of_row = torch.tensor([self.numbering[name] for name in owners], dtype=torch.int32)
        return self._ordered(to_device(of_row, device))

    def _ordered(self, of_row: torch.Tensor) -> AdapterNumbers:
        return AdapterNumbers(of_row, order_rows(of_row, len(self.numbering)))


def group_adapters(adapters: Mapping[str, Adapter]) -> GroupedAdapters | None:
    """Group adapters of one model. None without any; where their weights have a form or an address
    that grouped kernels do not read; and where one changes other layers than these kernels add
    to."""
    own = tuple(adapters.values())
    if not own or not all(map(_is_groupable, own)):
        return None
    zeros = _Zeros()
    layers = tuple(
        replace(
            same[0],
            attention=_group_part([layer.attention for layer in same], zeros),
            mlp=_group_part([layer.mlp for layer in same], zeros),
        )
        for same in zip(*(adapter.layers for adapter in own), strict=True)
    )
    output = _group([adapter.output for adapter in own], zeros)
    tables = _group_tables([adapter.embeddings for adapter in own], zeros)
    numbering = {name: number for number, name in enumerate((*adapters, ""))}
    grouped = GroupedAdapters(numbering, layers, tables, output)
    found = [output, tables, *(low for layer in layers for low in _sites(layer))]
    return grouped if all(low.is_readable for low in found if low is not None) else None


def padded_bytes(adapters: Mapping[str, Adapter], element_bytes: int) -> int:
    """Maximum device bytes of the copies that group_adapters makes: of weights below the common
    rank of their layer, and of all that is added to embeddings. element_bytes: of a weight."""
    own, total = tuple(adapters.values()), 0
    for lows in zip(*(_additions(adapter) for adapter in own), strict=True):
        found = [low for low in lows if low is not None]
        rank = _common_rank(lows)
        total += sum(
            rank * (low.down.num_in + low.up.num_out) for low in found if low.up.num_in < rank
        )
    tables = [adapter.embeddings for adapter in own if adapter.embeddings is not None]
    rank = _common_rank(tables)
    total += sum(rank * table.up.num_out for table in tables)
    total += sum(rank * len(own) * len(table.down) for table in tables[:1])
    return total * element_bytes


#: Names of the linear layers to which these kernels add, by part of a layer. Adapters that change
#: experts, or the heads of latent attention, run one after the other.
_SITES: Mapping[type, tuple[str, ...]] = MappingProxyType(
    {
        Attention: ("qkv", "output"),
        LatentAttention: ("query_down", "query", "latent", "output"),
        Mlp: ("gate_up", "down"),
        Experts: (),
    }
)


def _sites(layer: AdapterLayer) -> list[Any]:
    """A layer's additions, in the same order for every adapter; None where there is none."""
    parts = (layer.attention, layer.mlp)
    return [getattr(part, name) for part in parts for name in _SITES[type(part)]]


def _additions(adapter: Adapter) -> list[LowRank | None]:
    """The additions to linear layers, in the same order for every adapter of a model."""
    return [*(low for layer in adapter.layers for low in _sites(layer)), adapter.output]


def _is_groupable(adapter: Adapter) -> bool:
    """Whether all its additions are to layers to which these kernels add, and plain."""
    if any(layer.has_groups for layer in adapter.layers):
        return False
    lows = [low for low in _additions(adapter) if low is not None]
    others = [low for layer in adapter.layers for low in layer.linears if low is not None]
    weights = [part for low in lows for part in (low.down, low.up)]
    if adapter.embeddings is not None:
        weights.append(adapter.embeddings.up)
    return len(others) == len(lows) - (adapter.output is not None) and all(
        isinstance(weight, PlainLinear) and weight.bias is None for weight in weights
    )


class _Zeros:
    """Weights of zeros, one of each shape."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], PlainLinear] = {}

    def of(self, shape: tuple[int, int], like: torch.Tensor) -> PlainLinear:
        """like: has the type and the device."""
        if shape not in self._made:
            self._made[shape] = PlainLinear(like.new_zeros(shape), None)
        return self._made[shape]


def _group_part(parts: Sequence[Any], zeros: _Zeros) -> Any:
    """parts: one part of a layer, by adapter."""
    names = _SITES[type(parts[0])]
    grouped = {name: _group([getattr(part, name) for part in parts], zeros) for name in names}
    return replace(parts[0], **grouped)


def _group(lows: Sequence[LowRank | None], zeros: _Zeros) -> GroupedLowRank | None:
    """lows: of one layer, by adapter."""
    rank = _common_rank(lows)
    if not rank:
        return None
    downs = [None if low is None else low.down for low in lows]
    ups = [None if low is None else low.up for low in lows]
    return GroupedLowRank(_weights(downs, 0, rank, zeros), _weights(ups, 1, rank, zeros))


def _group_tables(tables: Sequence[LowRankTable | None], zeros: _Zeros) -> GroupedTable | None:
    found = [table for table in tables if table is not None]
    if not found:
        return None
    rank, first = _common_rank(tables), found[0].down
    down = first.new_zeros(len(tables), len(first), rank)
    for own, table in zip(down, tables, strict=True):
        if table is not None:
            own[:, : table.down.shape[1]] = table.down
    ups = [None if table is None else table.up for table in tables]
    return GroupedTable(down, _weights(ups, 1, rank, zeros))


def _common_rank(lows: Sequence[LowRank | LowRankTable | None]) -> int:
    """The rank to which the additions to a layer are padded; 0 if there is none."""
    most = max((low.up.num_in for low in lows if low is not None), default=0)
    return -(-most // _RANK_STEP) * _RANK_STEP


def _weights(linears: Sequence[Linear | None], dim: int, rank: int, zeros: _Zeros) -> GroupedLinear:
    """One weight for each adapter, with `rank` elements in that dimension, and zeros for rows
    without one."""
    weights = [linear.weight if isinstance(linear, PlainLinear) else None for linear in linears]
    first = next(weight for weight in weights if weight is not None)
    nothing = zeros.of((rank, first.shape[1]) if dim == 0 else (first.shape[0], rank), first)
    padded = [
        nothing if weight is None else PlainLinear(_padded(weight, nothing.weight), None)
        for weight in weights
    ]
    return GroupedLinear([*padded, nothing])


def _padded(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The weight with zeros at its ends, in the shape of `like`."""
    num_rows, num_columns = (at - size for at, size in zip(like.shape, weight.shape, strict=True))
    is_whole = num_rows == num_columns == 0
    return weight if is_whole else F.pad(weight, (0, num_columns, 0, num_rows))
