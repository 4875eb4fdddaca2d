"""How KV lies in a pool's blocks."""

from __future__ import annotations

from baton.types import KvLayout
from baton.v1 import kv_pb2


def layout_to_proto(layout: KvLayout) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(
        fingerprint=layout.fingerprint,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_size=layout.block_size,
    )


def layout_from_proto(message: kv_pb2.KvLayout) -> KvLayout:
    return KvLayout(
        fingerprint=message.fingerprint,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        block_size=message.block_size,
    )
