"""KV of the ranks of a context that have a pool each: after a layer, every rank gets the rows that
the others have written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from baton_kernels.host_copy import to_device
from engine.ranks.exchange import Ranks
from engine.ranks.token_shares import TokenShare
from engine.torch.divided import LayerDone


class ContextKv:
    """tensor, scales: of the rank's pool, see TorchKvPool."""

    def __init__(self, context: Ranks, tensor: torch.Tensor, scales: torch.Tensor | None) -> None:
        self._context = context
        memories = [tensor] if scales is None else [tensor, scales[..., None]]
        self._rows = [memory.view(torch.uint8) for memory in memories]
        """[blocks, layers, parts, kv_heads, block_size, bytes] each."""

    def exchange_of(self, shares: Sequence[TokenShare]) -> LayerDone:
        """A function that exchanges a layer's rows of a step, as a barrier. shares: by rank."""
        own, size = self._context.shard.rank, len(shares)
        block_size, device = self._rows[0].shape[4], self._rows[0].device
        places = [_places(share, block_size, device) for share in shares]
        longest = max(len(blocks) for blocks, _ in places)

        def exchange(layer: int) -> None:
            blocks, offsets = places[own]
            rows = [each[blocks, layer, :, :, offsets] for each in self._rows]
            packed = torch.cat([each.flatten(1) for each in rows], dim=1)
            padded = torch.nn.functional.pad(packed, (0, 0, 0, longest - len(packed)))
            gathered = self._context.gather(padded).view(longest, size, packed.shape[1])
            widths = [each[:1].numel() for each in rows]
            for rank, (blocks, offsets) in enumerate(places):
                if rank != own:
                    parts = torch.split(gathered[: len(blocks), rank], widths, dim=1)
                    for memory, part in zip(self._rows, parts, strict=True):
                        shape = (len(blocks), *memory.shape[2:4], memory.shape[5])
                        memory[blocks, layer, :, :, offsets] = part.reshape(shape)

        return exchange


def _places(
    share: TokenShare, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset within it of each new token, [tokens] int64 on the device."""
    slices = share.batch.slices
    positions = [range(part.start, part.start + len(part.token_ids)) for part in slices]
    blocks = [
        part.block_table[at // block_size]
        for part, own in zip(slices, positions, strict=True)
        for at in own
    ]
    offsets = torch.tensor(list(chain(*positions))) % block_size
    return to_device(torch.tensor(blocks), device), to_device(offsets, device)
