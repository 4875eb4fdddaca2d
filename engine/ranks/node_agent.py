"""The process of a node other than 0: connects its ranks to node 0, starts them, and ends with
them."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton import __version__
from baton.errors import ConfigError, StartupError
from engine.ranks.mesh import Degrees
from engine.ranks.nodes import GREETING_S, Channel, Hello, Nodes, files_digest, introduce
from engine.ranks.pulse import start_pulse
from engine.ranks.team import end, run_rank

#: Seconds between two attempts to reach node 0.
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class NodeRank:
    """A rank's process, its link to rank 0, which this process holds as well, and the process that
    sends its pulses."""

    rank: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    pulse: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """Node `node` of `nodes`, with a copy of the checkpoint in `folder`."""

    nodes: Nodes
    node: int
    degrees: Degrees
    folder: Path

    def join(self, cancelled: threading.Event) -> list[NodeRank]:
        """Start this node's ranks, connected to node 0. Waits until node 0 listens. cancelled: ends
        the waiting. Raises StartupError, ModelError, ConfigError."""
        self.nodes.check(self.degrees)
        if not 1 <= self.node < self.nodes.size:
            fix = f"use 0 to {self.nodes.size - 1}"
            raise ConfigError.of("node_rank", self.node, fix)
        files = files_digest(self.folder)
        deadline = time.monotonic() + self.nodes.timeout_s
        ranks = []
        for rank in self.nodes.ranks_of(self.node, self.degrees):
            with self._connect(rank, "control", files, deadline, cancelled) as control:
                link = self._connect(rank, "link", files, deadline, cancelled)
                with self._connect(rank, "pulse", files, deadline, cancelled) as pulse:
                    process = run_rank(control, link, pulse)
                    pulses = start_pulse(process.pid, [pulse])
                ranks.append(NodeRank(rank, process, link, pulses))
        return ranks

    def _connect(
        self, rank: int, channel: Channel, files: str, deadline: float, cancelled: threading.Event
    ) -> socket.socket:
        host, port = self.nodes.address, self.nodes.port
        while True:
            try:
                connection = socket.create_connection((host, port), GREETING_S)
                return self._greet(connection, rank, channel, files)
            except OSError as error:
                if cancelled.is_set():
                    raise StartupError(
                        f"node {self.node} was stopped while it waited for node 0 at {host}:{port}"
                    ) from error
                if time.monotonic() > deadline:
                    raise StartupError(
                        f"node {self.node} found no node 0 at {host}:{port} within "
                        f"{self.nodes.timeout_s:g} s ({error}); check --master-addr and "
                        "--master-port, and that node 0 runs"
                    ) from error
                cancelled.wait(_RETRY_S)

    def _greet(
        self, connection: socket.socket, rank: int, channel: Channel, files: str
    ) -> socket.socket:
        """Introduce a rank by a new connection, which is returned. Raises StartupError, and
        TimeoutError if node 0 does not answer yet."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = Hello(
            *(secrets.token_hex(16), __version__, self.nodes.size, self.node, rank, channel),
            *(self.degrees, connection.getsockname()[0], str(self.folder), files),
        )
        try:
            introduce(connection, hello, self.nodes.secret)
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise
            if isinstance(error, (OSError, ValueError, KeyError)):
                raise StartupError(
                    f"node {self.node}: what listens at {self.nodes.address}:{self.nodes.port} is "
                    f"no node 0 of Baton, or has ended ({error}); check --master-port"
                ) from error
            raise
        connection.settimeout(None)
        return connection


def wait_for(ranks: Sequence[NodeRank]) -> str:
    """Wait until one of a node's ranks ends, or rank 0 does, and end all, frozen ones too. Returns
    how it ended; empty if rank 0 ended it."""
    poll = select.poll()
    fds = [os.pidfd_open(each.process.pid) for each in ranks]
    for fd, each in zip(fds, ranks, strict=True):
        poll.register(fd, select.POLLIN)
        poll.register(each.link, select.POLLRDHUP)
    poll.poll()
    for fd, each in zip(fds, ranks, strict=True):
        os.close(fd)
        # Otherwise rank 0 would not see that the rank has ended.
        each.link.close()
    found = next((each for each in ranks if each.process.poll() is not None), None)
    for each in ranks:
        end(each.process)
        each.pulse.kill()
        each.pulse.wait()
    if found is None or not found.process.returncode:
        return ""
    return f"rank {found.rank} ended with status {found.process.returncode}"
