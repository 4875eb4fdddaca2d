"""A secret that all workers share: the two ends of a KV connection prove to each other that they
have it.

    sender                                     receiver
    KvHello(nonce)              ------------->
                                <-------------  KvAccept(nonce, proof)
    KvProof(proof)              ------------->
    every chunk and commit with a digest under the connection's own key, and every frame with one
    (FrameSeal)

Proofs and key are blake3 under the secret, each over its own label and what both ends have said of
themselves: both nonces, names, boots, versions and the type that KV travels in. So nothing of one
connection counts on another.

Seals bind every frame to its connection: from the proof on both directions count their frames. A
frame's digest is blake2b under the connection's key, personal to its direction, over count,
preamble and header; the header of a chunk has a digest of the payload in it. So a frame that is
changed, left out, sent twice, sent back, or taken from elsewhere does not pass, and neither does
any after it: the connection ends there.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from baton.errors import ConfigError
from baton.v1 import kv_pb2

_NONCE_BYTES = 16
_MIN_SECRET_BYTES = 16
_CONTEXT = "baton KV channel 2026-11-20: key of proofs and connections"


class KvSecret:
    """Immutable, and shows itself to nobody."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError if it is too short to be one."""
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"a secret of less than {_MIN_SECRET_BYTES} bytes")
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest()

    def receiver_proof(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        """That of KvAccept, once the other fields of both are there."""
        return self._digest(b"receiver", hello, accept)

    def sender_proof(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        """That of KvProof."""
        return self._digest(b"sender", hello, accept)

    def connection_key(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        """32 bytes, of the digests of chunks and commits."""
        return self._digest(b"connection", hello, accept)

    def is_held_by(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bool:
        """Whether the receiver that accepted has it. Compares in constant time."""
        return hmac.compare_digest(accept.proof, self.receiver_proof(hello, accept))

    def _digest(self, label: bytes, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        digest = blake3(key=self._key)
        for part in (label, *_said_by_sender(hello), *_said_by_receiver(accept)):
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.digest()


def new_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def has_nonce(message: kv_pb2.KvHello | kv_pb2.KvAccept) -> bool:
    """Whether the peer has a secret, and drew enough for a challenge."""
    return len(message.nonce) >= _NONCE_BYTES


def read_kv_secret(path: str | None) -> KvSecret | None:
    """The secret in a file, without white space around it; None for no file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return KvSecret(Path(path).read_bytes().strip())
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); give a file that this user may read"
    except ValueError as error:
        fix = f"has {error}; make one with openssl rand -hex 32"
    raise ConfigError.of("kv_secret_file", path, fix)


def _said_by_sender(hello: kv_pb2.KvHello) -> tuple[bytes, ...]:
    numbers = (hello.generation, hello.min_version, hello.max_version)
    return (hello.nonce, hello.worker_id.encode(), *(str(number).encode() for number in numbers))


def _said_by_receiver(accept: kv_pb2.KvAccept) -> tuple[bytes, ...]:
    names = (accept.worker_id.encode(), accept.wire_dtype.encode())
    return (accept.nonce, *names, str(accept.generation).encode(), str(accept.version).encode())


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
