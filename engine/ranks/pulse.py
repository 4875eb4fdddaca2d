"""Pulses: what a host says of a rank to the ranks of other hosts, beside the rank's own heartbeats.

A rank's thread needs the GIL and a turn to send a heartbeat, which may take it seconds on a busy
machine. So a small process beside it, `python -m engine.ranks.pulse PID FD...`, writes a byte to
each connection as long as the kernel says that the rank runs: it waits for nothing else.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from engine.ranks.process_state import is_running

#: Seconds between two pulses, and without one after which a rank is not known to run.
_BEAT_S, _SILENCE_S = 0.2, 1.0
#: -P keeps the working directory out of the import path: its folders may shadow modules.
_PROGRAM = (sys.executable, "-P", "-m", "engine.ranks.pulse")


def start_pulse(pid: int, connections: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Start the process that sends pulses of process `pid`, this one or a child of it, and ends
    with that one."""
    fds = [connection.fileno() for connection in connections]
    command = (*_PROGRAM, str(pid), *map(str, fds))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)


class Pulse:
    """The pulses of a rank on another host. May be used by several threads."""

    def __init__(self, connection: socket.socket) -> None:
        """connection: owned from here on."""
        self._connection = connection
        self._connection.setblocking(False)
        self._felt_s = float("-inf")

    def is_running(self) -> bool:
        """Whether the rank's host says so; False, too, once the process there that does has ended.
        Called often, because pulses count from then on."""
        with suppress(OSError):  # none has come, or the connection is broken
            while self._connection.recv(4096):
                self._felt_s = time.monotonic()
        return time.monotonic() < self._felt_s + _SILENCE_S


def _send_pulses(pid: int, connections: list[socket.socket]) -> None:
    ended = select.poll()
    try:
        # Its number may be another process's once it has ended.
        ended.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        return
    while connections:
        for connection in list(connections) if is_running(pid) else ():
            try:
                connection.send(b"\0", socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass  # nobody reads it
            except OSError:
                connections.remove(connection)
        if ended.poll(_BEAT_S * 1e3):
            return


if __name__ == "__main__":
    # Signals are for the rank, which may take long to end.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    _send_pulses(int(sys.argv[1]), [socket.socket(fileno=int(fd)) for fd in sys.argv[2:]])
