"""What a receiver checks of a chunk, and how it puts the chunk into blocks."""

from __future__ import annotations

from baton.types import KvRange
from baton.v1 import kv_pb2
from kv_transfer.agreement import Terms
from kv_transfer.checksum import chunk_checksum, place_checksum
from kv_transfer.device_memory import Payload


def place_of(chunk: kv_pb2.KvChunk) -> KvRange:
    """Where a chunk belongs."""
    return KvRange(chunk.first_token, chunk.num_tokens, chunk.first_layer, chunk.num_layers)


def header_fault(chunk: kv_pb2.KvChunk, num_bytes: int, terms: Terms) -> str:
    """What is wrong with the header of a chunk whose payload has `num_bytes`, as far as it alone
    tells."""
    if terms.version > 1 and chunk.place_checksum != place_checksum(chunk):
        return "a chunk whose header has a wrong checksum"
    piece = place_of(chunk)
    if num_bytes != chunk.payload_bytes or num_bytes != terms.codec.wire.num_bytes(piece):
        return f"a chunk of {num_bytes} bytes for {piece}"
    return ""


def payload_fault(chunk: kv_pb2.KvChunk, payload: tuple[memoryview, ...], terms: Terms) -> str:
    """What is wrong with the payload, in these pieces, of a chunk whose header is sound."""
    is_sound = chunk_checksum(chunk, payload, terms.key) == chunk.checksum
    return "" if is_sound else _wrong_checksum(chunk)


def store(chunk: kv_pb2.KvChunk, payload: Payload, block_ids: tuple[int, ...], terms: Terms) -> str:
    """Copy a payload into a sequence's blocks, unless it has a fault, which is returned: the blocks
    may then hold either.

    Raises what KvPool.unpack does, RuntimeError from the device.
    """
    codec, piece, seed = terms.codec, place_of(chunk), chunk.place_checksum
    if not isinstance(payload, memoryview):
        device = terms.on_device
        is_sound = device.unpack(block_ids, piece, payload, seed, chunk.checksum)
        return "" if is_sound else _wrong_checksum(chunk)
    if not terms.key:
        is_sound = codec.unpack_checked(block_ids, piece, payload, seed, chunk.checksum)
        return "" if is_sound else _wrong_checksum(chunk)
    fault = payload_fault(chunk, (payload,), terms)
    if not fault:
        codec.unpack(block_ids, piece, payload)
    return fault


def _wrong_checksum(chunk: kv_pb2.KvChunk) -> str:
    return f"a chunk with a wrong checksum: {place_of(chunk)}"
