"""Digests that bind every frame to its connection: its direction, its place in it, and its bytes.

Between workers that share a secret each direction has a key of its own, made of the connection's (kv_secret.py), and counts its
frames from the proof on. A frame's digest is blake3 under that key over count, preamble and header; the header of a chunk
has a digest of the payload in it. So a frame that is changed, left out, sent twice, sent back, or taken from elsewhere does not
pass, and neither does any after it: the connection ends there.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from blake3 import blake3

#: Of a digest, after its frame's header.
SEAL_BYTES = 16


class FrameSeal:
    """One direction of a connection, at either end of it."""

    def __init__(self, key: bytes) -> None:
        """key: 32 bytes, of this direction alone."""
        self._key = key
        self._num_frames = 0

    def next(self, frame: bytes) -> bytes:
        """The digest of the next frame: of its preamble and header."""
        count = self._num_frames.to_bytes(8, "little")
        self._num_frames += 1
        return blake3(count + frame, key=self._key).digest(length=SEAL_BYTES)

    def is_next(self, frame: bytes, digest: bytes) -> bool:
        """Whether it is the next frame, and as it was sent. Compares in constant time."""
        return hmac.compare_digest(self.next(frame), digest)


@dataclass(frozen=True, slots=True)
class Seals:
    """Both directions, as one end has them."""

    outgoing: FrameSeal
    incoming: FrameSeal


def sender_seals(key: bytes) -> Seals:
    """Of the sender of KV. key: the connection's."""
    return Seals(*map(FrameSeal, _direction_keys(key)))


def receiver_seals(key: bytes) -> Seals:
    """Of the receiver, at the other end."""
    return Seals(*map(FrameSeal, reversed(_direction_keys(key))))


def _direction_keys(key: bytes) -> tuple[bytes, bytes]:
    """To the receiver, and back."""
    forth = blake3(b"frames of the sender", key=key).digest()
    return forth, blake3(b"frames of the receiver", key=key).digest()
