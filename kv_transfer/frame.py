"""Frames of the KV channel: a fixed preamble, a protobuf header, and the payload of a chunk.

    offset  bytes  field (little endian)
    0       4      magic "BTKV"
    4       1      channel version: always 1 for KvHello, KvAccept and KvRefuse, otherwise the
                   agreed version
    5       1      type of the header
    6       2      zero
    8       4      bytes of the header
    12      4      bytes of the payload that follows it (0 where the payload is in shared memory)

Between workers that share a secret, the header of each frame after KvProof is followed by a 16-byte
digest, which no length field counts; see FrameSeal.

A chunk's checksum covers payload and header; a commit's covers the commit and all chunks. They
detect a payload sent as another's, and a changed token. The fields of a chunk's header that name
its place have a checksum of their own, which is checked before the payload arrives. Checksums are
xxh3_64, which protects against faults of hardware and software, not against forgery. With a shared
secret (kv_secret.py) they are the first 64 bits of blake3 under the connection's key, over header
and payload, which also protects against forgery: a guess succeeds with probability 2^-64, and a
wrong one ends the handoff. Payloads in memory that is private to one user
(KV_PAYLOAD_CHECKSUM_XXH3) always have an xxh3_64, in a header that is sealed.

For any input, decoding raises only FrameError, and allocates at most the given limits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import xxhash
from blake3 import blake3
from google.protobuf.message import DecodeError

from baton.errors import HandoffFailed
from baton.v1 import kv_pb2
from kv_transfer.kv_secret import SEAL_BYTES, FrameSeal

#: Checksums are added modulo 2^64.
CHECKSUM_MASK = (1 << 64) - 1
#: Fields: ticket_id, epoch, first_token, num_tokens, first_layer, num_layers.
_CHUNK = struct.Struct("<QIIIII")
#: Appended for a chunk of one group; absent otherwise, which keeps 0.1.0 byte-compatible. Signed,
#: as enums of protobuf are: a stranger may send any.
_GROUP = struct.Struct("<i")
#: Fields: ticket_id, epoch, num_tokens, exposed_us; followed by the ids of the first tokens.
_COMMIT = struct.Struct("<QIIQ")


#: Version of KvHello, KvAccept and KvRefuse, which negotiate the version. It never changes.
HANDSHAKE_VERSION = 1
MAGIC = b"BTKV"
#: Large enough for a ticket, or for a commit with log probabilities.
MAX_HEADER_BYTES = 64 * 1024

_MAX_TEXT = 1000

_PREAMBLE = struct.Struct("<4sBBHII")
PREAMBLE_BYTES = _PREAMBLE.size

Frame = (
    kv_pb2.KvHello
    | kv_pb2.KvAccept
    | kv_pb2.KvRefuse
    | kv_pb2.KvBegin
    | kv_pb2.KvChunk
    | kv_pb2.KvCommit
    | kv_pb2.KvRenew
    | kv_pb2.KvAbort
    | kv_pb2.KvCommitted
    | kv_pb2.KvCredit
    | kv_pb2.KvFetchPrefix
    | kv_pb2.KvLanded
    | kv_pb2.KvProof
)

#: Frame types by their number in the preamble.
FRAME_TYPES: Mapping[int, type[Frame]] = MappingProxyType(
    {
        1: kv_pb2.KvHello,
        2: kv_pb2.KvAccept,
        3: kv_pb2.KvRefuse,
        4: kv_pb2.KvBegin,
        5: kv_pb2.KvChunk,
        6: kv_pb2.KvCommit,
        7: kv_pb2.KvRenew,
        8: kv_pb2.KvAbort,
        9: kv_pb2.KvCommitted,
        10: kv_pb2.KvCredit,
        11: kv_pb2.KvFetchPrefix,
        12: kv_pb2.KvLanded,
        13: kv_pb2.KvProof,
    }
)
_NUMBERS: Mapping[type[Frame], int] = MappingProxyType({t: n for n, t in FRAME_TYPES.items()})
_HANDSHAKE_NUMBERS = frozenset({1, 2, 3})


class FrameError(HandoffFailed):
    """Invalid bytes, or a frame that is not allowed at this point. The connection must be
    closed."""


@dataclass(frozen=True, slots=True)
class Preamble:
    """Decoded preamble: the header's type, and the bytes of header and payload that follow.

    rest_bytes: header plus digest, if any. data: the preamble's own bytes.
    """

    type: int
    header_bytes: int
    rest_bytes: int
    payload_bytes: int
    data: bytes


def clipped(text: str) -> str:
    """Truncate a message so that it fits into any header."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def encode(
    frame: Frame,
    payload_bytes: int = 0,
    version: int = HANDSHAKE_VERSION,
    seal: FrameSeal | None = None,
) -> bytes:
    """Encode the preamble and header of a frame with `payload_bytes` bytes of payload. Raises
    FrameError if it is too large.

    version: the agreed one after the handshake. seal: the connection's, to append a digest.
    """
    header = frame.SerializeToString()
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"a {type(frame).__name__} of {len(header)} bytes is too large to send")
    number = _NUMBERS[type(frame)]
    version = HANDSHAKE_VERSION if number in _HANDSHAKE_NUMBERS else version
    data = _PREAMBLE.pack(MAGIC, version, number, 0, len(header), payload_bytes) + header
    return data + seal.next(data) if seal else data


def decode_preamble(
    data: bytes | bytearray | memoryview,
    max_payload_bytes: int,
    version: int = HANDSHAKE_VERSION,
    seal: FrameSeal | None = None,
) -> Preamble:
    """Decode PREAMBLE_BYTES bytes. Raises FrameError for invalid bytes, another version, or lengths
    above the limits."""
    if len(data) != PREAMBLE_BYTES:
        raise FrameError(f"a preamble of {len(data)} bytes")
    magic, stated, number, zero, header_bytes, payload_bytes = _PREAMBLE.unpack(data)
    if magic != MAGIC:
        raise FrameError("what came is not of the KV channel (wrong magic number)")
    if number not in FRAME_TYPES:
        raise FrameError(f"a frame of unknown type {number}")
    expected = HANDSHAKE_VERSION if number in _HANDSHAKE_NUMBERS else version
    if stated != expected or zero:
        raise FrameError(f"a frame of version {stated} where version {expected} was agreed on")
    if header_bytes > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} may come")
    if payload_bytes > max_payload_bytes:
        raise FrameError(
            f"a payload of {payload_bytes} bytes; at most {max_payload_bytes} may come"
        )
    rest_bytes = header_bytes + (SEAL_BYTES if seal else 0)
    return Preamble(number, header_bytes, rest_bytes, payload_bytes, bytes(data))


def decode_header(
    preamble: Preamble, data: bytes | bytearray | memoryview, seal: FrameSeal | None = None
) -> Frame:
    """Decode the `rest_bytes` bytes after a preamble. Raises FrameError for invalid bytes or a
    wrong digest."""
    if len(data) != preamble.rest_bytes:
        raise FrameError(f"a header of {len(data)} bytes, not of {preamble.header_bytes}")
    kind = FRAME_TYPES[preamble.type]
    header = bytes(data[: preamble.header_bytes])
    if seal and not seal.is_next(preamble.data + header, bytes(data[preamble.header_bytes :])):
        raise FrameError(f"a {kind.__name__} that the peer has not sent now, or not so")
    try:
        return kind.FromString(header)
    except DecodeError:
        raise FrameError(f"the header of a {kind.__name__} cannot be read") from None


class FrameBuffer:
    """Splits a byte stream without payloads into frames. version: updated by KvAccept.

    seal: set once frames must carry digests.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self.version = HANDSHAKE_VERSION
        self.seal: FrameSeal | None = None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes; the caller must consume all. Raises FrameError as
        the decoders do."""
        self._data += data
        while len(self._data) >= PREAMBLE_BYTES:
            head = self._data[:PREAMBLE_BYTES]
            preamble = decode_preamble(head, 0, self.version, self.seal)
            end = PREAMBLE_BYTES + preamble.rest_bytes
            if len(self._data) < end:
                return
            header = self._data[PREAMBLE_BYTES:end]
            del self._data[:end]
            frame = decode_header(preamble, header, self.seal)
            if isinstance(frame, kv_pb2.KvAccept):
                self.version = frame.version
            yield frame


def place_checksum(chunk: kv_pb2.KvChunk) -> int:
    """Checksum of the header fields that name the chunk's place: KvChunk.place_checksum."""
    place = (chunk.first_token, chunk.num_tokens, chunk.first_layer, chunk.num_layers)
    data = _CHUNK.pack(chunk.ticket_id, chunk.epoch, *place)
    if chunk.group:
        data += _GROUP.pack(chunk.group)
    return xxhash.xxh3_64_intdigest(data)


def chunk_checksum(chunk: kv_pb2.KvChunk, payload: Sequence[memoryview], key: bytes = b"") -> int:
    """Checksum of a chunk with this payload, given in pieces. Without a key: the payload's xxh3_64,
    seeded with chunk.place_checksum. key: the connection's, 32 bytes, or empty."""
    if key:
        return _keyed(chunk, payload, key)
    if len(payload) == 1:
        return xxhash.xxh3_64_intdigest(payload[0], chunk.place_checksum)
    digest = xxhash.xxh3_64(seed=chunk.place_checksum)
    for piece in payload:
        digest.update(piece)
    return digest.intdigest()


def commit_checksum(commit: kv_pb2.KvCommit, chunks: int, key: bytes = b"") -> int:
    """Checksum of a commit. chunks: sum of the checksums of all chunks of its ticket."""
    if key:
        digest = _keyed(commit, (), key)
    else:
        head = _COMMIT.pack(commit.ticket_id, commit.epoch, commit.num_tokens, commit.exposed_us)
        ids = [token.token_id for token in commit.first_tokens]
        digest = xxhash.xxh3_64_intdigest(head + struct.pack(f"<{len(ids)}I", *ids))
    return (chunks + digest) & CHECKSUM_MASK


def _keyed(
    header: kv_pb2.KvChunk | kv_pb2.KvCommit, payload: Sequence[memoryview], key: bytes
) -> int:
    """Unknown fields of later versions are included: they are serialised after the known ones, as
    the sender did."""
    bare = type(header)()
    bare.MergeFrom(header)  # type: ignore[arg-type]
    bare.ClearField("checksum")
    data = bare.SerializeToString(deterministic=True)
    name = type(header).__name__.encode()
    digest = blake3(name + len(data).to_bytes(4, "little") + data, key=key)
    for piece in payload:
        digest.update(piece)
    return int.from_bytes(digest.digest(length=8), "little")
