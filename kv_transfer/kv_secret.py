"""A secret shared by all workers, which the two ends of a KV connection prove to each other.

    sender                                     receiver
    KvHello(nonce)              ------------->
                                <-------------  KvAccept(nonce, proof)
    KvProof(proof)              ------------->
    every chunk and commit with a digest under the connection's own key, and every frame with one
    (FrameSeal)

Proofs and key are blake3 under the secret, each over a label of its own and the identity of both
ends: nonces, names, boots, versions, the part and the wire dtype. Values of one connection are
therefore invalid on any other.

Seals bind every frame to its connection. After the proof, both directions count their frames. A
frame's digest is blake2b under the connection's key, personalised by direction, over count,
preamble and header; a chunk's header contains a digest of its payload. A frame that is changed,
dropped, repeated, reflected or taken from another connection fails the check, and ends the
connection.
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
    """The secret. Immutable; its repr does not show it."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError if the secret is too short."""
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"a secret of less than {_MIN_SECRET_BYTES} bytes")
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest()

    @property
    def node_key(self) -> bytes:
        """Key of the proofs between hosts of one worker, see engine.ranks.nodes."""
        return blake3(b"nodes", key=self._key).digest()

    @classmethod
    def of_key(cls, key: bytes) -> KvSecret:
        """The secret with this key, of the same worker's rank 0."""
        secret = cls.__new__(cls)
        secret._key = key
        return secret

    @property
    def key(self) -> bytes:
        """Derived from the secret; as confidential as that."""
        return self._key

    def receiver_proof(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        """The proof for KvAccept, computed from all other fields of both messages."""
        return self._digest(b"receiver", hello, accept)

    def sender_proof(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        """The proof for KvProof."""
        return self._digest(b"sender", hello, accept)

    def connection_key(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        """The 32-byte key of the digests of chunks and commits."""
        return self._digest(b"connection", hello, accept)

    def tier_key(self) -> bytes:
        """The 32-byte key of KV records that workers share in a store."""
        return blake3(b"tiers", key=self._key).digest()

    def is_held_by(self, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bool:
        """Check the receiver's proof, in constant time."""
        return hmac.compare_digest(accept.proof, self.receiver_proof(hello, accept))

    def _digest(self, label: bytes, hello: kv_pb2.KvHello, accept: kv_pb2.KvAccept) -> bytes:
        digest = blake3(key=self._key)
        for part in (label, *_said_by_sender(hello), *_said_by_receiver(accept)):
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.digest()


def new_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def has_nonce(message: kv_pb2.KvHello | kv_pb2.KvAccept) -> bool:
    """Whether the peer has a secret, and sent a nonce of sufficient length."""
    return len(message.nonce) >= _NONCE_BYTES


def read_kv_secret(path: str | None) -> KvSecret | None:
    """Read the secret from a file, stripped of surrounding white space; None without a path. Raises
    ConfigError."""
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
    # A sender of all KV says nothing of parts, as in 0.1.0.
    part = (hello.part.SerializeToString(deterministic=True),) if hello.HasField("part") else ()
    return (
        *(hello.nonce, hello.worker_id.encode(), *(str(number).encode() for number in numbers)),
        *part,
    )


def _said_by_receiver(accept: kv_pb2.KvAccept) -> tuple[bytes, ...]:
    names = (accept.worker_id.encode(), accept.wire_dtype.encode())
    return (accept.nonce, *names, str(accept.generation).encode(), str(accept.version).encode())


#: Bytes of the digest after a frame's header.
SEAL_BYTES = 16

_TO_RECEIVER, _TO_SENDER = b"kv to receiver", b"kv to sender"


class FrameSeal:
    """Digests of one direction of a connection; used at both ends."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        """key: the connection's, 32 bytes. direction: at most 16 bytes."""
        self._keyed = hashlib.blake2b(key=key, digest_size=SEAL_BYTES, person=direction)
        self._num_frames = 0

    def next(self, frame: bytes) -> bytes:
        """Return the digest of the next frame. frame: its preamble and header."""
        digest = self._keyed.copy()
        digest.update(self._num_frames.to_bytes(8, "little") + frame)
        self._num_frames += 1
        return digest.digest()

    def is_next(self, frame: bytes, digest: bytes) -> bool:
        """Check the digest of the next frame, in constant time."""
        return hmac.compare_digest(self.next(frame), digest)


@dataclass(frozen=True, slots=True)
class Seals:
    """The seals of both directions at one end."""

    outgoing: FrameSeal
    incoming: FrameSeal


def sender_seals(key: bytes) -> Seals:
    """Seals at the sender's end. key: the connection's."""
    return Seals(FrameSeal(key, _TO_RECEIVER), FrameSeal(key, _TO_SENDER))


def receiver_seals(key: bytes) -> Seals:
    """Seals at the receiver's end. key: the connection's."""
    return Seals(FrameSeal(key, _TO_SENDER), FrameSeal(key, _TO_RECEIVER))
