"""Several hosts as one worker: node 0 has rank 0 and takes connections of the others' ranks.

    node R                                        node 0
                                 <-------------   {"nonce", "version"}
    {"hello": Hello, "proof"}    ------------->
                                 <-------------   {"error", "proof"}
    then, without an error, a connection for commands, or one for a Link

Proofs are digests under the workers' secret, empty by default, of the other end's nonce and the
message. They cover the greeting alone: what follows is neither encrypted nor sealed, as little as
exchanges over gloo and NCCL are, so that nodes need a network of their own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from baton import __version__
from baton.errors import ConfigError, StartupError
from engine.checkpoint import find_shards
from engine.families.read import read_raw
from engine.ranks.mesh import Degrees

#: Deadline of each message of a greeting.
GREETING_S = 10.0
#: Longest line of a greeting.
_MAX_LINE = 1 << 16

#: What a connection is for.
Channel = Literal["control", "link", "pulse"]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts that share an engine's ranks evenly, and where node 0 awaits the others.

    timeout_s: deadline for all nodes to be there. secret: of --kv-secret-file, empty without.
    """

    size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 300.0
    secret: bytes = field(default=b"", repr=False)

    def ranks_of(self, node: int, degrees: Degrees) -> range:
        """The ranks of a node."""
        length = degrees.num_ranks // self.size
        return range(node * length, (node + 1) * length)

    def check(self, degrees: Degrees) -> None:
        """Raise ConfigError unless the nodes can share the ranks evenly. Ranks with sequences of
        their own have one memory for KV."""
        if self.size > 1 and degrees.by_sequence:
            raise ConfigError.of(
                degrees.context_option,
                degrees.context,
                f"its ranks need one host, not nnodes={self.size}; leave one of them out",
            )
        if degrees.num_ranks % self.size:
            fix = f"{degrees.num_ranks} ranks cannot be shared evenly; give a divisor of that"
            raise ConfigError.of("nnodes", self.size, fix)


#: An engine on one host.
ONE_NODE = Nodes()


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first message, sent by its node. host: its address towards node 0. folder: of its
    copy of the checkpoint; files: see files_digest."""

    nonce: str
    version: str
    num_nodes: int
    node: int
    rank: int
    channel: Channel
    degrees: Degrees
    host: str
    folder: str
    files: str

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"


_HELLOS = TypeAdapter(Hello)
_MESSAGES = TypeAdapter(dict[str, str])


def files_digest(folder: Path) -> str:
    """Digest of a checkpoint's config.json, and of its shards' names and sizes: reads no weights.
    Raises ModelError."""
    read_raw(folder)  # for its errors
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in find_shards(folder):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def refusal(hello: Hello, nodes: Nodes, degrees: Degrees, files: str) -> str:
    """Why node 0 does not take a rank; empty if it does. files: node 0's. Neither side has
    contexts, see Nodes.check."""
    if hello.version != __version__:
        return (
            f"rank {hello.rank} on {hello.name} has Baton {hello.version}, node 0 has "
            f"{__version__}; install the same on all nodes"
        )
    own = nodes.ranks_of(hello.node, degrees)
    other = hello.degrees
    for option, theirs, ours in (
        ("nnodes", hello.num_nodes, nodes.size),
        ("tensor-parallel-size", other.tensor, degrees.tensor),
        ("pipeline-parallel-size", other.pipeline, degrees.pipeline),
        ("enable-expert-parallel", other.whole_experts, degrees.whole_experts),
        ("tensor-parallel-cut", other.cut, degrees.cut),
    ):
        if theirs != ours:
            return f"{hello.name} has --{option} {theirs}, node 0 {ours}; give all nodes the same"
    if not 1 <= hello.node < nodes.size or hello.rank not in own:
        return f"{hello.name} has no rank {hello.rank}; --node-rank is 1 to {nodes.size - 1}"
    if hello.files != files:
        return (
            f"{hello.name}, rank {hello.rank}, has another checkpoint in {hello.folder} than node "
            "0; give all nodes the same files"
        )
    return ""


def proof(secret: bytes, nonce: str, text: str) -> str:
    """Digest under the secret of the other end's nonce and of what is said."""
    return hmac.digest(secret, f"{nonce}\n{text}".encode(), "sha256").hex()


def send_line(connection: socket.socket, message: dict[str, str]) -> None:
    """Send a message of a greeting. Raises OSError, also after GREETING_S."""
    connection.settimeout(GREETING_S)
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket) -> dict[str, str]:
    """Read a message of a greeting, and not a byte more. Raises OSError, also after GREETING_S, and
    ValueError for anything else than a message."""
    line, deadline = bytearray(), time.monotonic() + GREETING_S
    while not line.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole message in time")
        connection.settimeout(left_s)
        byte = connection.recv(1)
        if not byte or len(line) > _MAX_LINE:
            raise ValueError("no message of a node")
        line += byte
    return _MESSAGES.validate_json(line)


def introduce(connection: socket.socket, hello: Hello, secret: bytes) -> None:
    """A node's half of the greeting. Raises StartupError if node 0 refuses, OSError, ValueError."""
    challenge = read_line(connection)
    text = _HELLOS.dump_json(hello).decode()
    send_line(connection, {"hello": text, "proof": proof(secret, challenge["nonce"], text)})
    answer = read_line(connection)
    wanted = proof(secret, hello.nonce, answer["error"])
    # A node without the secret is refused, and sees why; it cannot check who says so.
    if not is_same(answer["proof"], wanted) and (secret or not answer["error"]):
        raise StartupError(
            f"node 0 and node {hello.node} have different secrets; give both the same "
            "--kv-secret-file"
        )
    if answer["error"]:
        raise StartupError(answer["error"])


def read_hello(message: dict[str, str], nonce: str, secret: bytes) -> Hello | None:
    """The hello of a node that has the secret; None without it. Raises KeyError, ValueError."""
    text = message["hello"]
    if not is_same(message["proof"], proof(secret, nonce, text)):
        return None
    return _HELLOS.validate_json(text)


def is_same(given: str, wanted: str) -> bool:
    """Compare proofs, in a time that does not depend on them."""
    # Texts that are no ASCII cannot be compared so.
    return hmac.compare_digest(given.encode(), wanted.encode())
