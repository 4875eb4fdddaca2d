"""A secret that all workers share: the two ends of a KV connection prove to each other that they
have it.

    sender                                     receiver
    KvHello(nonce)              ------------->
                                <-------------  KvAccept(nonce, proof)
    KvProof(proof)              ------------->
    every chunk and commit with a digest under the connection's own key, and every frame with one
    (frame_seal.py)

Proofs and key are blake3 under the secret, each over its own label and what both ends have said of
themselves: both nonces, names, boots, versions and the type that KV travels in. So nothing of one
connection counts on another.
"""

from __future__ import annotations

import hmac
import secrets
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
    told = (hello.generation, hello.min_version, hello.max_version)
    return (hello.nonce, hello.worker_id.encode(), *(str(number).encode() for number in told))


def _said_by_receiver(accept: kv_pb2.KvAccept) -> tuple[bytes, ...]:
    names = (accept.worker_id.encode(), accept.wire_dtype.encode())
    return (accept.nonce, *names, str(accept.generation).encode(), str(accept.version).encode())
