"""Digests that bind every frame to its connection: its direction, its place in it, and its bytes.

Between workers that share a secret both directions count their frames from the proof on. A frame's
digest is blake2b under the connection's key (kv_secret.py), personal to its direction, over count,
preamble and header; the header of a chunk has a digest of the payload in it. So a frame that is
changed, left out, sent twice, sent back, or taken from elsewhere does not pass, and neither does
any after it: the connection ends there.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

#: Of a digest, after its frame's header.
SEAL_BYTES = 16

_TO_RECEIVER, _TO_SENDER = b"kv to receiver", b"kv to sender"


class FrameSeal:
    """One direction of a connection, at either end of it."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        """key: the connection's, 32 bytes. direction: at most 16 bytes."""
        self._keyed = hashlib.blake2b(key=key, digest_size=SEAL_BYTES, person=direction)
        self._num_frames = 0

    def next(self, frame: bytes) -> bytes:
        """The digest of the next frame: of its preamble and header."""
        digest = self._keyed.copy()
        digest.update(self._num_frames.to_bytes(8, "little") + frame)
        self._num_frames += 1
        return digest.digest()

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
    return Seals(FrameSeal(key, _TO_RECEIVER), FrameSeal(key, _TO_SENDER))


def receiver_seals(key: bytes) -> Seals:
    """Of the receiver, at the other end."""
    return Seals(FrameSeal(key, _TO_SENDER), FrameSeal(key, _TO_RECEIVER))
