"""Node 0's side: takes the connections of all ranks on other nodes."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from baton import __version__
from baton.errors import ConfigError, StartupError
from engine.ranks.mesh import Degrees
from engine.ranks.nodes import (
    Channel,
    Hello,
    Nodes,
    proof,
    read_hello,
    read_line,
    refusal,
    send_line,
)

_log = logging.getLogger(__name__)

_OTHER_SECRET = "a node has another secret than node 0; give both the same --kv-secret-file"
#: Seconds between two reports of who is missing.
_REPORT_S = 10.0
#: Clients that are greeted at once.
_MAX_GREETINGS = 64


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """Connections of a rank on another node."""

    hello: Hello
    control: socket.socket
    link: socket.socket
    pulse: socket.socket


class NodeListener:
    """Listens from construction on. Each client is greeted by a thread of its own, so that a silent
    one delays no other."""

    def __init__(self, nodes: Nodes, degrees: Degrees, files: str) -> None:
        """files: digest of node 0's checkpoint. Raises ConfigError if the port cannot be had."""
        self._nodes, self._degrees, self._files = nodes, degrees, files
        self._found: dict[int, dict[Channel, tuple[Hello, socket.socket]]] = defaultdict(dict)
        self._missing = set(range(degrees.num_ranks)) - set(nodes.ranks_of(0, degrees))
        self._refused = ""
        self._is_over = False
        self._changed = threading.Condition()
        """Guards all four."""
        self._places = threading.Semaphore(_MAX_GREETINGS)
        try:
            self._listener = socket.create_server((nodes.address, nodes.port))
        except OSError as error:
            fix = (
                f"node 0 cannot listen there ({error.strerror}); give a free port, and an address "
                "of node 0's host as --master-addr"
            )
            where = f"{nodes.address}:{nodes.port}"
            raise ConfigError.of("master_port", where, fix) from error

    @property
    def address(self) -> tuple[str, int]:
        """IP address and port."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def wait(self) -> dict[int, RemoteRank]:
        """All ranks of other nodes, by rank. Closes the listener. Raises StartupError if some are
        missing at the deadline, or one is not fit."""
        with self._listener:
            threading.Thread(target=self._accept, name="nodes", daemon=True).start()
            try:
                self._wait_for_all()
            finally:
                # Wakes the thread.
                self._listener.shutdown(socket.SHUT_RDWR)
        return {
            rank: RemoteRank(found["control"][0], *(found[each][1] for each in get_args(Channel)))
            for rank, found in self._found.items()
        }

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self._nodes.timeout_s
        with self._changed:
            try:
                while self._missing and not self._refused:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise StartupError(self._count())
                    if not self._changed.wait(min(left, _REPORT_S)):
                        _log.info("%s", self._count())
                if self._refused:
                    raise StartupError(self._refused)
            finally:
                self._is_over = True

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, (address, *_) = self._listener.accept()
                self._places.acquire()
                greeting = (connection, address)
                threading.Thread(target=self._greet, args=greeting, daemon=True).start()

    def close(self) -> None:
        """Close the listener and all connections. Idempotent."""
        self._listener.close()
        for found in self._found.values():
            for _, connection in found.values():
                connection.close()

    def _count(self) -> str:
        nodes, degrees = self._nodes, self._degrees
        missing = {
            node
            for node in range(1, nodes.size)
            if self._missing & set(nodes.ranks_of(node, degrees))
        }
        there = [str(node) for node in range(nodes.size) if node not in missing]
        host, port = self.address
        return (
            f"of {nodes.size} nodes, {', '.join(there)} are there, and {_list(missing)} not; start "
            f"them with --node-rank {_list(missing)} --master-addr {host} --master-port {port}"
        )

    def _greet(self, connection: socket.socket, address: str) -> None:
        """Greet a rank; drop any other client."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_hex(16)
        reason = _OTHER_SECRET
        try:
            send_line(connection, {"nonce": nonce, "version": __version__})
            hello = read_hello(read_line(connection), nonce, self._nodes.secret)
            if hello is None:
                send_line(connection, {"error": reason, "proof": ""})
            else:
                with self._changed:
                    if self._answer(connection, hello):
                        return
                reason = "it does not fit"
        except (OSError, ValueError, KeyError) as error:
            reason = str(error)
        finally:
            self._places.release()
        # Anyone may reach the port: node 0 waits on.
        _log.warning("dropped a connection of %s: %s", address, reason)
        connection.close()

    def _answer(self, connection: socket.socket, hello: Hello) -> bool:
        """Take a rank, or refuse it: whether its connection stays. Raises OSError."""
        if self._is_over:
            return False
        refused = self._refusal(hello)
        send_line(
            connection,
            {"error": refused, "proof": proof(self._nodes.secret, hello.nonce, refused)},
        )
        connection.settimeout(None)
        if refused:
            self._refused = refused
        else:
            self._found[hello.rank][hello.channel] = hello, connection
            if len(self._found[hello.rank]) == len(get_args(Channel)):
                self._missing.discard(hello.rank)
        self._changed.notify()
        return not refused

    def _refusal(self, hello: Hello) -> str:
        if hello.channel in self._found[hello.rank]:
            other = self._found[hello.rank][hello.channel][0]
            return (
                f"{hello.name} has rank {hello.rank}, as {other.name} has; give each another "
                "--node-rank"
            )
        return refusal(hello, self._nodes, self._degrees, self._files)


def _list(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
